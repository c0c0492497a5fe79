"""Keeps a store's host alive beside the hub: a process of its own, started again when it dies.

Running groups need no store, so its loss stops nobody; the next roster waits for the next one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from everstep import clock
from everstep.process import kernel
from everstep.process.loop import Loop
from everstep.recovery.line import Line
from everstep.recovery.link import Link

MOST_FALSE_STARTS = 3
_OURS = str(Path(clock.__file__).parent.parent)
_PROGRAM = """
import sys
sys.path.append(sys.argv.pop(1))
from everstep.process.kernel import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from everstep.recovery.link import Link
from everstep.store.host import main
main(Link.from_fd(int(sys.argv[1])), sys.argv[2])
"""
"""Imports torch, which nothing in this package does."""
COMPLAINTS = ("StoreTimeout", "StoreError")

_ADDRESS = re.compile(r"store [^\s:]+:(\d+)")


class StoreKeeper:
    """Calls `ready` when a host serves, `failed` when there will be none.

    `given` is the port of a host in rank 0's process: it serves until ours, whose import of torch takes seconds, does.
    """

    def __init__(
        self, loop: Loop, bind: str, given: int | None, ready: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        self._loop, self._bind, self._given, self._ready, self._failed = loop, bind, given, ready, failed
        self._false_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._line: Line | None = None
        self._port: int | None = None

    def port(self) -> int | None:
        """Return where it serves; None while it does not."""
        if self._process is not None and self._process.poll() is not None:
            return self._given  # the news of its end is on its way here
        return self._given if self._port is None else self._port

    def forget_given(self) -> None:
        """Rank 0 is lost, and its host with it."""
        self._given = None

    def start(self) -> None:
        """Have a host of our own made."""
        ours, theirs = Link.pair()
        words = [sys.executable, "-P", "-c", _PROGRAM, _OURS, str(os.getpid()), str(theirs.fileno()), self._bind]
        self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._line = Line(self._loop, ours, self._said)
        self._loop.watch(self._pidfd, self._gone)

    def forget(self, epoch: int, generation: int) -> None:
        """This generation has a roster: what stands in our host for earlier ones is void (see `store.keys`)."""
        if self._line is not None and self._port is not None:
            self._line.send({"kind": "store.forget", "epoch": epoch, "generation": generation})

    def suspect(self, complaint: str) -> None:
        """A worker's fault may be the store's: a frozen one is ended, and so replaced."""
        if not complaint.startswith(COMPLAINTS):
            return
        if self._port is None:
            self._given = None
        elif self._process is not None and not _of_another(complaint, self._port):
            kernel.kill(self._process.pid)

    def _said(self, message: dict[str, object], fds: list[int]) -> None:
        del fds
        if message["kind"] == "store.ready":
            self._port = int(str(message["port"]))
            self._false_starts = 0
            self._ready()

    def _gone(self) -> None:
        served, self._port = self._port is not None, None
        self._let_go()
        self._false_starts += not served
        if self._false_starts < MOST_FALSE_STARTS:
            self.start()
        else:
            text = f"the store's process ended {MOST_FALSE_STARTS} times before it could serve"
            self._failed(f"{text}; see what it printed")

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._line is not None:
            process.wait()
            self._line.close()
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)

    def close(self) -> None:
        """End the host."""
        if self._process is not None:
            kernel.kill(self._process.pid)
            self._let_go()


def _of_another(complaint: str, port: int) -> bool:
    """Tell whether it names the address of a store that stood elsewhere: its successor is not to blame."""
    named = _ADDRESS.search(complaint)
    return named is not None and int(named[1]) != port
