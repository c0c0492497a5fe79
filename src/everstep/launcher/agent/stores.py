"""The store's process as its agent holds it: one at a time, begun again when it is gone, frozen, or to be new.

Rule 1: running groups need no store, so its loss stops nobody; the next generation waits for the next one.
Rule 2: one that does not serve within START_S, or whose clients complain, is killed (and one that is stopped, by
        `Nursery.patrol`): a dead store is replaced in milliseconds, a frozen one is waited for again and again.
Rule 3: MOST_FALSE_STARTS in a row that end before they serve, and the job has no store: `failed`, once.
"""

import re
from collections.abc import Callable

from everstep.errors import ExitCode
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.process import Process
from everstep.process.loop import Loop

ENTRY = "everstep.store.host:main"
STORE = "store"
MOST_FALSE_STARTS = 3
START_S = 30.0
COMPLAINTS = ("StoreTimeout", "StoreError")
_ADDRESS = re.compile(r"store ([^\s:]+:\d+)")


class Stores:
    """Holds the store's address; `changed` is called when there is one (again) or none, `failed` where none will be."""

    def __init__(
        self,
        loop: Loop,
        nursery: Nursery,
        place: tuple[str, int],
        changed: Callable[[], None],
        failed: Callable[[int, str], None],
    ) -> None:
        """`place`: the address to listen on and the port, 0 for any free one."""
        self._loop, self._nursery, self._place = loop, nursery, place
        self._changed, self._failed = changed, failed
        self._process: Process | None = None
        self._false_starts = 0
        self.address: tuple[str, int] | None = None

    def start(self) -> None:
        """Have a store made."""
        self.address = None
        order = {"role": "helper", "entry": ENTRY, "arguments": {"host": self._place[0], "port": self._place[1]}}
        process = self._process = self._nursery.order(STORE, order, self._said, self._gone)
        self._loop.later(START_S, lambda: self._too_late(process))

    def renew(self) -> None:
        """Have this one end: its end starts the next, on the same port where one was given. Without one, try again."""
        self._lose()
        if self._process is None:
            self._false_starts = 0
            self.start()
        else:
            self._process.expected_end = True
            self._process.kill()

    def forget(self, epoch: int, generation: int) -> None:
        """This generation has begun: what stands there for earlier ones is void (see `store.keys`)."""
        if self._process is not None and self.address is not None:
            self._process.send({"kind": "store.forget", "epoch": epoch, "generation": generation})

    def suspect(self, complaint: str) -> None:
        """A worker's fault may be the store's; not this one's, where the complaint names the address of another.

        Nobody is told of it any more: a rank that met on a store about to end would be at fault again.
        """
        if self._process is None or self.address is None or not complaint.startswith(COMPLAINTS):
            return
        named = _ADDRESS.search(complaint)
        if named is not None and named[1] != f"{self.address[0]}:{self.address[1]}":
            return
        self._nursery.notice("the store does not serve; the next generation gets a new one")
        self._lose()
        self._process.expected_end = True
        self._process.kill()

    def _lose(self) -> None:
        if self.address is not None:
            self.address = None
            self._changed()

    def _too_late(self, process: Process) -> None:
        """It has a process, and does not serve. Its birth is the nursery's care."""
        if process is self._process and self.address is None and process.pid:
            process.kill()

    def _said(self, process: Process, message: dict[str, object], fds: list[int]) -> None:
        del fds
        if process is not self._process:
            return
        if message["kind"] == "store.ready":
            self.address = (str(message["host"]), int(str(message["port"])))
            self._false_starts = 0
            self._changed()
        elif message["kind"] == "store.failed":
            self._process = None  # it is on its way out
            self._failed(int(ExitCode.CONFIGURATION), str(message["text"]))

    def _gone(self, process: Process, status: int) -> None:
        if process is not self._process:
            return
        self._process = None
        served = self.address is not None
        self._lose()
        if self._nursery.barren_for:
            self._failed(int(ExitCode.BAD_NODE), f"no store can be started: {self._nursery.barren_for}")
            return
        if process.expected_end or served:
            if not process.expected_end:
                self._nursery.notice("the store has gone; running groups need none, the next generation gets a new one")
            self.start()
            return
        self._false_starts += 1
        if self._false_starts < MOST_FALSE_STARTS:
            self.start()
            return
        text = f"the store's process ended {MOST_FALSE_STARTS} times before it could serve, last with status {status}"
        self._failed(int(ExitCode.CONFIGURATION), f"{text}; see what it printed")
