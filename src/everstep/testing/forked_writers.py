"""Writers as real processes, forked from the test's own warm process, for tests that kill them.

`ForkedWriter` runs any function over a line in a child; `ForkedBench` is the bench with such writers behind it.
"""

import os
import select
import signal
from collections.abc import Callable, Sequence
from typing import Any

from everstep.clock import SYSTEM
from everstep.recovery.api import Child, Message
from everstep.recovery.link import Link, LinkClosed
from everstep.testing.disk_bench import DiskBench

MAX_FD = 4096
Serve = Callable[[Link], None]


class ForkedWriter:
    """A child that serves a line; `recovery.api.Child`."""

    def __init__(self, name: str, rank: int, serve: Serve) -> None:
        self.name, self.rank = name, rank
        self.link, theirs = Link.pair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _keep_only(theirs.fileno())
                serve(Link(theirs))
            finally:
                os._exit(0)
        theirs.close()
        self.status: int | None = None

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Child.send`. To one that is gone: nothing."""
        try:
            self.link.send(message, fds)
        except LinkClosed:
            return

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]] | None:
        """Return its next message; None when it is gone. AssertionError when it says nothing in time."""
        ready, _, _ = select.select([self.link], [], [], timeout_s)
        assert ready, f"{self.name} has said nothing for {timeout_s} s"
        try:
            return self.link.receive()
        except LinkClosed:
            self.wait()
            return None

    def kill(self) -> None:
        """See `Child.kill`."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Reap it; return its exit code or minus the signal."""
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def close(self) -> None:
        """Hang up and see it end."""
        self.link.close()
        self.wait()


def _keep_only(fd: int) -> None:
    """Close all but the standard descriptors and one: a line held by a sibling would never be seen to end."""
    os.closerange(3, fd)
    os.closerange(fd + 1, MAX_FD)


class ForkedBench(DiskBench):
    """The bench with forked writers: `write` waits for them."""

    def __init__(self, directory: str, serve: Callable[[str, int], Serve], **arguments: Any) -> None:
        self._serve = serve
        self.forked: list[ForkedWriter] = []
        super().__init__(directory, **arguments)

    def spawn(self, name: str, entry: str, arguments: Any) -> Child:
        """See `Host.spawn`."""
        assert entry == "everstep.checkpoint.writer:main"
        rank: int = arguments["rank"]
        self.forked.append(ForkedWriter(name, rank, self._serve(arguments["directory"], rank)))
        return self.forked[-1]

    def write(self, orders: int = 10_000) -> int:
        """Hand on what the writers say until nothing is outstanding; return how much they said."""
        said = 0
        deadline = SYSTEM.now() + 30
        while self.disk.outstanding and said < orders:
            assert SYSTEM.now() < deadline, "the writers do not come to an end"
            said += self.hear(1.0)
        return said

    def hear(self, timeout_s: float) -> int:
        """Hand on what the writers have to say now, or within a time; return how much."""
        ready, _, _ = select.select([writer.link for writer in self.forked], [], [], timeout_s)
        for writer in [one for one in self.forked if one.link in ready]:
            try:
                message, fds = writer.link.receive()
            except LinkClosed:
                self.forked.remove(writer)
                writer.link.close()
                self.disk.on_child_exit(writer, writer.wait())
                continue
            self.disk.on_child_message(writer, message, fds)
        return len(ready)

    def kill(self, rank: int) -> None:
        """A writer is killed; its end is heard later."""
        next(writer for writer in self.forked if writer.rank == rank).kill()

    def close(self) -> None:
        """The agent ends, and its writers with it."""
        super().close()
        for writer in self.forked:
            writer.close()
        self.forked.clear()
