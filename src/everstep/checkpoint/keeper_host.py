"""What the keeper offers the shelf and the tiers that ride on it: lines to ranks, and writers.

Writers, holders and readers are forked from the keeper, which has one thread and no torch: they begin in milliseconds.
They end with it, but for one that stands in a call to a device that nothing ends: nobody waits for that.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from everstep.checkpoint import reading_beside
from everstep.checkpoint.asked_shelf import AskedShelf
from everstep.checkpoint.hashing import Hashing
from everstep.checkpoint.keeper_claims import Claims
from everstep.checkpoint.keeper_ledger import KeeperLedger
from everstep.checkpoint.ondemand import OnDemand
from everstep.checkpoint.tier_settings import MAIN
from everstep.events import Event, Notice
from everstep.process import kernel
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Companion, Message
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.recovery.line import Line
from everstep.recovery.link import Link
from everstep.telemetry import boot_id, say

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


class Writer:
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


class KeeperHost:
    """What stands behind the `recovery.api.Host` of the shelf and of every tier."""

    def __init__(
        self,
        loop: Loop,
        settings: Mapping[str, Any],
        shelf: AskedShelf,
        tiers: Sequence[OnDemand],
        ledger: KeeperLedger,
    ) -> None:
        self._loop, self.clock, self.ledger = loop, loop.clock, ledger
        self._settings = settings
        self.shelf, self.tiers = shelf, tiers
        self.run_dir = f"a Checkpointer of process {settings['pid']}"
        self.world_size = int(settings["world_size"])
        self.lines: dict[int, Line] = {}
        self.generation = -1
        self.rechecked: Callable[[], None] = lambda: None
        self._writers: dict[int, tuple[Writer, Owner]] = {}
        self._readers: dict[int, int] = {}  # process → its pidfd
        self._closed = False
        self.taken_s: dict[tuple[int, int], float] = {}  # when each buffer was filled, by rank and buffer

    def start(self) -> None:
        """Start all that rides here; raises EverstepError where a directory cannot serve."""
        self.shelf.start(_OwnHost(self, self.shelf))
        hashing = Hashing(self.shelf)
        hashing.start(_OwnHost(self, hashing))
        for tier in self.tiers:
            tier.start(_OwnHost(self, tier))

    def rank_of(self, line: Line) -> int | None:
        """The rank whose line this is."""
        return next((rank for rank, one in self.lines.items() if one is line), None)

    def said(self, rank: int, kind: str, message: Message) -> None:
        """A rank says something to what rides here."""
        if kind.endswith(".offer"):
            self.taken_s[rank, int(message["buffer"])] = self.clock.wall()
        if kind == f"{MAIN}.offer":
            self.ledger.taken(rank, message)
        companions: list[Companion] = [self.shelf, *self.tiers]
        for companion in companions:
            if kind.startswith(f"{companion.prefix}."):
                companion.on_message(rank, message, ())

    def enter(self, step: int | None = None) -> dict[int, dict[str, Message]]:
        """Begin the next generation, from `step` where it is given; return what each rank is told, by prefix."""
        self.shelf.only = step
        try:
            return self._enter()
        finally:
            self.shelf.only = None

    def _enter(self) -> dict[int, dict[str, Message]]:
        if self.generation >= 0:
            self.shelf.on_stopped(self.generation)
        self.generation += 1
        members = tuple(
            Member(rank, Incarnation(boot_id(), 1 + rank, self.generation), "host", rank, False, "kept")
            for rank in range(self.world_size)
        )
        roster = Roster(0, self.generation, members)
        told: dict[int, dict[str, Message]] = {rank: {} for rank in range(self.world_size)}
        companions: list[Companion] = [self.shelf, *self.tiers]
        for companion in companions:
            for rank, message in companion.on_roster(roster).items():
                told[rank][companion.prefix] = message
        return told

    def drained(self) -> bool:
        """True when nothing is left to be written."""
        return not [tier for tier in self.tiers if not tier.drained(True)]  # each is asked

    def problems(self) -> list[str]:
        """What went wrong and has no handle of its own."""
        return [
            text if tier.tier == MAIN else f"{tier.tier}: {text}" for tier in self.tiers for text in tier.problems()
        ]

    def tell(self, message: Message) -> None:
        """Say something to every rank."""
        for rank in self.lines:
            self.send(rank, message)

    def patrol(self) -> None:
        """A writer that is stopped answers nothing, for ever: it is killed, and so replaced."""
        for writer, _ in list(self._writers.values()):
            stat = kernel.status(writer.pid)
            writer.stopped = writer.stopped + 1 if stat is not None and stat.state in "Tt" else 0
            if writer.stopped > 1:
                writer.kill()

    def close(self) -> None:
        """The end: writers end with their lines, and are reaped."""
        self._closed = True
        for tier in self.tiers:
            tier.close()
        left = [*self._writers, *self._readers]
        for writer, owner in list(self._writers.values()):
            if not isinstance(owner, Claims):  # a holder gives its claim up by itself when its line closes
                writer.kill()
            self._forget(writer)
        for pid, pidfd in self._readers.items():
            self._loop.unwatch(pidfd)
            os.close(pidfd)
            kernel.kill(pid)
        self._readers.clear()
        self._bury(left)
        self.shelf.close()
        for line in self.lines.values():
            line.close()

    # -- Host ----------------------------------------------------------------------------------------------------

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        line = self.lines.get(rank)
        if line is not None:
            line.send(message, fds)

    def reader(self, rank: int, message: Message) -> None:
        """Send `message`, and with it a rank's line to a process that reads directories for it."""
        ours, theirs = Link.pair()
        pid = os.fork()
        if not pid:
            _child(theirs.detach(), reading_beside.ENTRY, {}, "everstep-reader")
        theirs.close()
        self._readers[pid] = os.pidfd_open(pid)
        self._loop.watch(self._readers[pid], lambda: self._reader_gone(pid))
        self.send(rank, message, [ours.fileno()])
        ours.close()

    def _reader_gone(self, pid: int) -> None:
        pidfd = self._readers.pop(pid, None)
        if pidfd is None:
            return  # buried with us
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)

    def _bury(self, pids: list[int]) -> None:
        deadline = self.clock.now() + BURY_S
        while pids and self.clock.now() < deadline:
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            if pids:
                self.clock.sleep(0.002)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any], owner: Owner) -> Child:
        """Fork a helper whose words and end come to `owner`."""
        ours, theirs = Link.pair()
        words = {**arguments, "training": self._settings["training"]}
        pid = os.fork()
        if not pid:
            _child(theirs.detach(), entry, words, f"everstep-{name}")
        theirs.close()

        def heard(message: dict[str, Any], fds: list[int]) -> None:
            owner.on_child_message(writer, message, fds)

        writer = Writer(name, pid, Line(self._loop, ours, heard))
        self._writers[pid] = writer, owner
        self._loop.watch(writer.pidfd, lambda: self._buried(writer, owner))
        return writer

    def emit(self, event: Event) -> None:
        """See `Host.emit`: what people should read is said."""
        self.ledger.emit(event)
        if isinstance(event, Notice) and event.level != "info":
            say(event.text)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""
        self._loop.later(delay_s, self._tick)

    def recheck(self) -> None:
        """See `Host.recheck`: in a turn of its own, for it may end us."""
        self._loop.later(0.0, lambda: self.rechecked())

    def _tick(self) -> None:
        if self._closed:
            return
        now = self.clock.now()
        self.shelf.on_tick(now)
        for tier in self.tiers:
            tier.on_tick(now)

    def _buried(self, writer: Writer, owner: Owner) -> None:
        if writer.pid not in self._writers:
            return  # buried with us
        self._forget(writer)
        _, status = os.waitpid(writer.pid, 0)
        if not self._closed:
            owner.on_child_exit(writer, os.waitstatus_to_exitcode(status))

    def _forget(self, writer: Writer) -> None:
        del self._writers[writer.pid]
        self._loop.unwatch(writer.pidfd)
        os.close(writer.pidfd)
        writer.line.close()  # what it still said comes first


class _OwnHost:
    """Implements `recovery.api.Host` for one of them: its writers' words come to it."""

    def __init__(self, host: KeeperHost, owner: Companion) -> None:
        self._host, self._owner = host, owner
        self.clock, self.run_dir, self.world_size = host.clock, host.run_dir, host.world_size

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        self._host.send(rank, message, fds)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`."""
        return self._host.spawn(name, entry, arguments, self._owner)

    def emit(self, event: Event) -> None:
        """See `Host.emit`."""
        self._host.emit(event)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""
        self._host.later(delay_s)

    def recheck(self) -> None:
        """See `Host.recheck`."""
        self._host.recheck()


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
