"""A link with a queue: sending never blocks the agent, whatever state the other process is in."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.process.loop import Loop
from everstep.recovery.link import Link, LinkClosed

MOST_QUEUED = 4096
"""Messages kept for a process that does not read (a stopped one); beyond them the newest are dropped."""


class Line:
    """One of our ends, watched by the loop."""

    def __init__(
        self,
        loop: Loop,
        link: Link,
        on_message: Callable[[dict[str, Any], list[int]], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._link = link
        self._on_message, self._on_end = on_message, on_end
        self._queue: deque[tuple[Mapping[str, Any], list[int]]] = deque()
        self.open = True
        self.ended = False  # the other side has hung up
        link.setblocking(False)
        loop.watch(link.fileno(), self._read)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send now or when there is room; descriptors are duplicated, the caller keeps its own."""
        if not self.open or len(self._queue) >= MOST_QUEUED:
            return
        self._queue.append((message, [os.dup(fd) for fd in fds]))
        self._flush()

    def _flush(self) -> None:
        while self._queue:
            message, fds = self._queue[0]
            try:
                self._link.send(message, fds)
            except BlockingIOError:
                self._loop.watch(self._link.fileno(), self._flush, write=True)
                return
            except LinkClosed:
                self._drop()
                return
            self._queue.popleft()
            _close(fds)
        if self.open:
            self._loop.unwatch(self._link.fileno(), write=True)

    def _read(self) -> None:
        while self.open:
            try:
                message, fds = self._link.receive()
            except BlockingIOError:
                return
            except LinkClosed:
                if not self.ended:
                    self.ended = True
                    self._loop.unwatch(self._link.fileno())
                    self._on_end()
                return
            except ValueError:  # not JSON, or cut: one bad packet never ends the agent
                continue
            if isinstance(message.get("kind"), str):
                self._on_message(message, fds)
            else:
                _close(fds)

    def _drop(self) -> None:
        while self._queue:
            _close(self._queue.popleft()[1])

    def close(self) -> None:
        """Read what was still said, then let the descriptor go."""
        if self.open:
            self._read()
        if self.open:  # whoever heard of its end may have closed it
            self.open = False
            self._drop()
            self._loop.unwatch(self._link.fileno())
            self._link.close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
