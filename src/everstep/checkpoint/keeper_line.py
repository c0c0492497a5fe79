"""A rank's line to its keeper: one thread receives, whoever likes sends, and nobody waits for one that is not there.

The thread also seals what a device has copied. It is woken by an event descriptor, and joined before the interpreter
ends: no thread of ours is inside a call then.
"""

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.clock import SYSTEM
from everstep.errors import CheckpointError
from everstep.process import kernel
from everstep.recovery.link import Link, LinkClosed

SEAL_MS = 10
STOPPED_S = 10.0
"""A keeper that is stopped for so long is as good as gone."""
LOOK_S = 0.5
Message = Mapping[str, Any]


class KeeperLine:
    """`on_message` is called on the thread with all but answers; `sealed` tells whether a copy is still under way."""

    def __init__(
        self,
        link: Link,
        pid: int,
        on_message: Callable[[Message, Sequence[int]], None],
        on_lost: Callable[[str], None],
        sealed: Callable[[], bool],
    ) -> None:
        self._link, self.pid = link, pid
        self._on_message, self._on_lost, self._sealed = on_message, on_lost, sealed
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopped_since: float | None = None
        self._asks = 0
        self.lost = ""  # why nothing comes any more
        self.closing = False
        self._thread = threading.Thread(target=self._serve, name="everstep-checkpointer", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Tell the keeper. Raises CheckpointError where it is gone."""
        try:
            self._link.send(message)
        except LinkClosed:
            raise CheckpointError(self.lost or self._gone()) from None

    def copying(self) -> None:
        """A copy from a device is under way: the thread seals it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def ask(self, message: Mapping[str, Any], timeout_s: float | None = None) -> Message:
        """Ask, and wait for the answer to this question. CheckpointError where the keeper is gone, TimeoutError."""
        self._asks += 1
        self.send({**message, "ask": self._asks})
        return self.answer(timeout_s)

    def answer(self, timeout_s: float | None = None) -> Message:
        """Wait for the next answer to the last question; `fds` of it are the caller's to close."""
        deadline = None if timeout_s is None else SYSTEM.now() + timeout_s
        while True:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - SYSTEM.now())
            if left <= 0:
                raise TimeoutError(f"the keeper of the checkpoints (process {self.pid}) has not answered in time")
            with contextlib.suppress(queue.Empty):
                message = self._answers.get(timeout=left)
                if message.get("ask") == self._asks:
                    return message
                for fd in message["fds"]:
                    os.close(fd)
                continue
            dead = self.dead()
            if dead:
                raise CheckpointError(dead)

    def say_again(self, message: Mapping[str, Any]) -> None:
        """Go on with the question that is open."""
        self.send({**message, "ask": self._asks})

    def dead(self) -> str:
        """Say why the keeper will not answer; nothing while it may. A stopped one counts as dead after STOPPED_S."""
        if self.lost or not self._thread.is_alive():
            return self.lost or self._gone()
        stat = kernel.status(self.pid)
        if stat is None or stat.state not in "Tt":
            self._stopped_since = None
            return ""
        self._stopped_since = self._stopped_since or SYSTEM.now()
        if SYSTEM.now() - self._stopped_since < STOPPED_S:
            return ""
        return f"the keeper of the checkpoints (process {self.pid}) is stopped: continue it (kill -CONT {self.pid})"

    def close(self) -> None:
        """End the line, and the thread."""
        self.closing = True
        self._link.shutdown()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if not self._thread.is_alive():
            self._link.close()
            os.close(self._wake)

    def _gone(self) -> str:
        return (
            f"the keeper of the checkpoints (process {self.pid}) is gone: it was killed, or ran out of memory; what "
            "was committed is whole. Make another Checkpointer to go on saving"
        )

    def _lose(self, text: str) -> None:
        self.lost = text
        self._on_lost(text)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        waiting = False
        while True:
            ready = [fd for fd, _ in poll.poll(SEAL_MS if waiting else None)]
            if self._wake in ready:
                os.eventfd_read(self._wake)
            waiting = not self._sealed()
            if self._link.fileno() in ready and not self._receive():
                return

    def _receive(self) -> bool:
        try:
            message, fds = self._link.receive()
        except ValueError:
            return True
        except LinkClosed:
            if not self.closing:
                self._lose(self.lost or self._gone())
            return False
        if message["kind"] == "ckpt.lost":
            self._lose(str(message["text"]))
            return True
        if str(message["kind"]).startswith("ckpt."):
            self._answers.put({**message, "fds": fds})
        else:
            self._on_message(message, fds)
        return True
