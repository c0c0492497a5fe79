"""The helpers of one keeper on its own host: writers, holders, readers, forked from it, watched, replaced and buried.

The keeper has one thread and no torch: they begin in milliseconds. They end with it, but for one that stands in a call
to a device that nothing ends: nobody waits for that.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from everstep.checkpoint import reading_beside
from everstep.process import kernel
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Message
from everstep.recovery.line import Line
from everstep.recovery.link import Link

BURY_S = 1.0
"""How long the end waits for helpers that were killed: one that is stuck in the kernel is left behind."""


class Owner(Protocol):
    """To whom a helper's words and end come."""

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""
        ...

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        ...


class Speaker(Protocol):
    """A line to a rank."""

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send now or when there is room; descriptors are duplicated."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class Helper:
    """A forked helper; implements `recovery.api.Child`."""

    def __init__(self, name: str, pid: int, line: Line) -> None:
        self.name, self.pid, self.line = name, pid, line
        self.pidfd = os.pidfd_open(pid)
        self.stopped = 0  # looks in a row that have found it stopped

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Child.send`."""
        self.line.send(message, fds)

    def kill(self) -> None:
        """See `Child.kill`."""
        kernel.kill(self.pid)


class Hands:
    """All helpers of one keeper. `training`: with what versions the job trains, which each is told."""

    def __init__(self, loop: Loop, training: Mapping[str, str]) -> None:
        self._loop, self._training = loop, training
        self._helpers: dict[int, tuple[Helper, Owner]] = {}
        self._readers: dict[int, int] = {}  # process → its pidfd
        self._closed = False

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any], owner: Owner) -> Child:
        """Fork a helper whose words and end come to `owner`."""
        ours, theirs = Link.pair()
        words = {**arguments, "training": self._training}
        pid = os.fork()
        if not pid:
            _child(theirs.detach(), entry, words, f"everstep-{name}")
        theirs.close()

        def heard(message: dict[str, Any], fds: list[int]) -> None:
            owner.on_child_message(helper, message, fds)

        helper = Helper(name, pid, Line(self._loop, ours, heard))
        self._helpers[pid] = helper, owner
        self._loop.watch(helper.pidfd, lambda: self._ended(helper, owner))
        return helper

    def reader(self, line: Speaker, message: Message, visible_s: float | None = None) -> None:
        """Send `message` over a rank's line, and with it a line to a process that reads directories for that rank.

        `visible_s`: another host may have written what is read; so long it may take to be seen here.
        """
        ours, theirs = Link.pair()
        pid = os.fork()
        if not pid:
            words = {} if visible_s is None else {"visible_s": visible_s}
            _child(theirs.detach(), reading_beside.ENTRY, words, "everstep-reader")
        theirs.close()
        self._readers[pid] = os.pidfd_open(pid)
        self._loop.watch(self._readers[pid], lambda: self._reader_gone(pid))
        line.send(message, [ours.fileno()])
        ours.close()

    def _reader_gone(self, pid: int) -> None:
        pidfd = self._readers.pop(pid, None)
        if pidfd is None:
            return  # buried with us
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)

    def patrol(self) -> None:
        """A helper that is stopped answers nothing, for ever: it is killed, and so replaced."""
        for helper, _ in list(self._helpers.values()):
            stat = kernel.status(helper.pid)
            helper.stopped = helper.stopped + 1 if stat is not None and stat.state in "Tt" else 0
            if helper.stopped > 1:
                helper.kill()

    def close(self, by_itself: Callable[[Owner], bool] = lambda owner: False) -> None:
        """The end: helpers are killed and reaped, but for those `by_itself` that end when their lines close."""
        self._closed = True
        left = [*self._helpers, *self._readers]
        for helper, owner in list(self._helpers.values()):
            if not by_itself(owner):
                helper.kill()
            self._forget(helper)
        for pid, pidfd in self._readers.items():
            self._loop.unwatch(pidfd)
            os.close(pidfd)
            kernel.kill(pid)
        self._readers.clear()
        self._bury(left)

    def _bury(self, pids: list[int]) -> None:
        clock = self._loop.clock
        deadline = clock.now() + BURY_S
        while pids and clock.now() < deadline:
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            if pids:
                clock.sleep(0.002)

    def _ended(self, helper: Helper, owner: Owner) -> None:
        if helper.pid not in self._helpers:
            return  # buried with us
        self._forget(helper)
        _, status = os.waitpid(helper.pid, 0)
        if not self._closed:
            owner.on_child_exit(helper, os.waitstatus_to_exitcode(status))

    def _forget(self, helper: Helper) -> None:
        del self._helpers[helper.pid]
        self._loop.unwatch(helper.pidfd)
        os.close(helper.pidfd)
        helper.line.close()  # what it still said comes first


def _child(line: int, entry: str, arguments: Mapping[str, Any], name: str) -> None:
    """What a forked helper runs: its line, the standard streams, and nothing else of the keeper's."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        low = os.dup2(line, 3) if line != 3 else 3  # noqa: PLR2004 - the first above the standard streams
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        kernel.name_process(name)
        module, _, function = entry.partition(":")
        getattr(import_module(module), function)(Link.from_fd(low), **arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the keeper must not go on in its child
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
    os._exit(code)
