"""One process of this job on this node, from its order to its end."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.process import kernel
from everstep.recovery.core.words import Incarnation
from everstep.recovery.line import Line

OnMessage = Callable[["Process", dict[str, Any], list[int]], None]
OnExit = Callable[["Process", int], None]


@dataclass(eq=False)
class Process:
    """Ordered, then born (it has a pid and an incarnation), then gone. `line` is there once it has been forked for."""

    name: str
    number: int  # of its order; stands in its environment (see process.mark)
    on_message: OnMessage
    on_exit: OnExit
    slot: int | None = None
    rank: int | None = None
    line: Line | None = None
    pid: int = 0
    incarnation: Incarnation | None = None
    pidfd: int = -1
    expected_end: bool = False
    killed: bool = False
    gone: bool = False  # dead and reaped: its pid is nobody's, or another's
    unasked: bool = False  # it was ending by itself when we came to end it
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    _early: list[tuple[Mapping[str, Any], list[int]]] = field(default_factory=list[tuple[Mapping[str, Any], list[int]]])

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """See `recovery.api.Child.send`. What is said before the process runs comes to it after our `go`."""
        if self.incarnation is None:
            self._early.append((message, [os.dup(fd) for fd in fds]))
        elif self.line is not None:
            self.line.send(message, fds)

    def go(self, incarnation: Incarnation) -> None:
        """We know who it is and hold its pidfd: it may run."""
        self.incarnation = incarnation
        self.send({"kind": "go", "incarnation": str(incarnation)})
        while self._early:
            message, fds = self._early.pop(0)
            self.send(message, fds)
            for fd in fds:
                os.close(fd)

    def kill(self) -> None:
        """SIGKILL; the end comes to `on_exit`."""
        self.killed = True
        if self.pid:
            kernel.kill(self.pid)

    def end(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal to make room; where it was ending already, its end stays its own.

        The kernel closes a dying process's sockets before its parent can reap it: a peer may tell of the broken
        connection first.
        """
        known = kernel.status(self.pid) if self.pid else None
        self.unasked = known is not None and known.ending
        self.expected_end = not self.unasked
        if number == signal.SIGKILL:
            self.kill()
        else:
            self.signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.pid:
            kernel.kill(self.pid, number)

    def hang_up(self) -> None:
        """Let its line go, after reading what it still said; whoever has the other end, and no `go` yet, ends."""
        line, self.line = self.line, None
        if line is not None:
            line.close()

    def forget(self) -> None:
        """It will not be born: what was to be said to it is let go."""
        self.hang_up()
        for _, fds in self._early:
            for fd in fds:
                os.close(fd)
        self._early.clear()
