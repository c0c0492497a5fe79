"""An agent in small: forks ranks from a warm process, carries the shelf's messages over real links, reaps.

Run by the scripts beside it in a process of their own: torch is imported, but no tensor operation runs before a fork.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.clock import SYSTEM
from everstep.events import Event
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.recovery.link import Link, LinkClosed

Body = Callable[[Snapshotter, Link, int], None]


class SmallAgent:
    """One node. `generation(body)` forks a process for each rank; `pump` serves them."""

    clock = SYSTEM
    run_dir = ""

    def __init__(self, shelf: Shelf, world_size: int) -> None:
        self.shelf = shelf
        self.world_size = world_size
        self.events: list[Event] = []
        self.links: dict[int, Link] = {}
        self.pids: dict[int, int] = {}
        self.said: list[tuple[int, Mapping[str, Any]]] = []
        self.told: Mapping[int, Mapping[str, Any]] = {}
        self._generation = -1
        self._due = False
        shelf.start(self)

    def send(self, rank: int, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(LinkClosed):
            self.links[rank].send(message, fds)

    def spawn(self, name, entry, arguments):
        raise NotImplementedError(name)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def later(self, delay_s: float) -> None:
        self._due = True

    def recheck(self) -> None:
        pass

    def generation(self, body: Body) -> None:
        if self._generation >= 0:
            self.shelf.on_stopped(self._generation)
        self._generation += 1
        ranks = range(self.world_size)
        members = tuple(
            Member(r, Incarnation("small", 1 + r, self._generation), "n", r, True, "started") for r in ranks
        )
        self.told = self.shelf.on_roster(Roster(0, self._generation, members))
        for rank in ranks:
            self._fork(rank, body)

    def pump(self, until: Callable[[], bool] = lambda: False, limit_s: float = 60.0) -> None:
        """Serve until every rank has closed its line, or `until` says so."""
        deadline = time.monotonic() + limit_s
        while self.links and not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(self.links)} did not end in {limit_s} s")
            ready, _, _ = select.select(list(self.links.values()), [], [], 0.0 if self._due else 0.05)
            for rank in [r for r, link in self.links.items() if link in ready]:
                self._serve(rank)
            if self._due:
                self._due = False
                self.shelf.on_tick(time.monotonic())

    def reap(self) -> dict[int, int]:
        """Wait for all processes; return rank -> status (minus the signal)."""
        for link in self.links.values():
            link.close()
        self.links.clear()
        ended = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in self.pids.items()}
        self.pids.clear()
        return ended

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def _serve(self, rank: int) -> None:
        try:
            message, fds = self.links[rank].receive()
        except LinkClosed:
            self.links.pop(rank).close()
            return
        if message["kind"].startswith("snapshot."):
            self.shelf.on_message(rank, message, fds)
        else:
            self.said.append((rank, message))

    def _fork(self, rank: int, body: Body) -> None:
        ours, theirs = Link.pair()
        told = self.told[rank]
        pid = os.fork()
        if pid:
            theirs.close()
            self.links[rank], self.pids[rank] = ours, pid
            return
        code = 1
        try:
            for link in [ours, *self.links.values()]:
                link.close()
            _child(Link(theirs), rank, self.world_size, told, body)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
        os._exit(code)


def _child(link: Link, rank: int, world_size: int, told: Mapping[str, Any], body: Body) -> None:
    snapshotter = Snapshotter(link.send, deadline_s=30.0)

    def wait() -> None:
        with contextlib.suppress(LinkClosed, OSError):
            while True:
                snapshotter.on_message(*link.receive())

    threading.Thread(target=wait, daemon=True).start()
    snapshotter.begin(rank, world_size, told)
    body(snapshotter, link, rank)
    link.shutdown()
