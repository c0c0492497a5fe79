"""What the keeper offers the shelf and its tiers: lines to ranks, and writers, here or on other hosts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.asked_shelf import AskedShelf
from everstep.checkpoint.hashing import Hashing
from everstep.checkpoint.keeper_claims import Claims
from everstep.checkpoint.keeper_far import Far, FarLine
from everstep.checkpoint.keeper_hands import Hands, Owner, Speaker
from everstep.checkpoint.keeper_ledger import KeeperLedger
from everstep.checkpoint.ondemand import OnDemand
from everstep.checkpoint.tier_settings import MAIN
from everstep.events import Event, Notice
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Companion, Message
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.telemetry import boot_id, say


class KeeperHost:
    """What stands behind the `recovery.api.Host` of the shelf and of every tier."""

    def __init__(
        self,
        loop: Loop,
        settings: Mapping[str, Any],
        shelf: AskedShelf,
        tiers: Sequence[OnDemand],
        ledger: KeeperLedger,
        hands: Hands,
        far: Far | None = None,
    ) -> None:
        self._loop, self.clock, self.ledger = loop, loop.clock, ledger
        self._far, self._hands = far, hands
        self.shelf, self.tiers = shelf, tiers
        self.run_dir = f"a Checkpointer of process {settings['pid']}"
        self.world_size = int(settings["world_size"])
        self.lines: dict[int, Speaker] = {}
        self.generation = -1
        self.rechecked: Callable[[], None] = lambda: None
        self._closed = False
        self.taken_s: dict[tuple[int, int], float] = {}  # when each buffer was filled (monotonic), by rank and buffer

    def start(self) -> None:
        """Start all that rides here; raises EverstepError where a directory cannot serve."""
        self.shelf.start(_OwnHost(self, self.shelf))
        hashing = Hashing(self.shelf)
        hashing.start(_OwnHost(self, hashing))
        for tier in self.tiers:
            tier.start(_OwnHost(self, tier))

    def rank_of(self, line: Speaker) -> int | None:
        """The rank whose line this is."""
        return next((rank for rank, one in self.lines.items() if one is line), None)

    def said(self, rank: int, kind: str, message: Message) -> None:
        """A rank says something to what rides here."""
        if kind.endswith(".offer"):
            self.taken_s[rank, int(message["buffer"])] = self.clock.now()
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
        """See `Hands.patrol`."""
        self._hands.patrol()

    def close(self) -> None:
        """The end: writers end with their lines, and are reaped; a holder gives its claim up by itself."""
        self._closed = True
        for tier in self.tiers:
            tier.close()
        if self._far is not None:
            self._far.close()  # before the directories are given up
        self._hands.close(by_itself=lambda owner: isinstance(owner, Claims))
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
        line = self.lines.get(rank)
        if isinstance(line, FarLine):
            line.plan(message)
        elif line is not None:
            self._hands.reader(line, message)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any], owner: Owner) -> Child:
        """Fork a helper whose words and end come to `owner`: of a rank, where that stands."""
        rank = arguments.get("rank")
        if self._far is not None and rank is not None and self._far.at(rank) is not None:
            return self._far.spawn(rank, name, entry, arguments, owner)
        return self._hands.spawn(name, entry, arguments, owner)

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
