"""The agent's side of the memory tier: holds the buffers of every rank, and decides what a generation begins from.

Rule 1: buffers are the agent's: they outlive the worker that wrote them and are handed to whoever holds the rank next.
Rule 2: the agent reads headers itself; no word of a worker is needed, least of all of a dead one.
Rule 3: what is newer than the chosen step, or not on the living line, is void before the new generation steps.
Rule 4: memory is judged before it is allocated, in full, in slices that keep the agent's loop free.
Rule 5: a buffer that a slower tier holds stays as it is until it releases it, whatever becomes of its worker. What a
    worker kept for a tier that did not take it before the generation ended is free again.

Rule 6: where a world goes on from one of another size, the buffers that it began from are kept, and handed to all of
    its ranks for reading, until every rank has sealed a snapshot of its own (docs/adr/0014). Then what belonged to
    ranks that are no more is let go.

Messages from a worker: `attach` (its state needs so many bytes; it has these sets mapped), `hold`, `outgrown`,
`damaged`, `open` (for reading, what this generation began from), `settled` (it has sealed a snapshot of its own). To a
worker: `buffers` and `opened` with descriptors, `refused`, `released`. Without torch and numpy.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint import memory
from everstep.checkpoint.core.budget import Memory, Need, shortage, size
from everstep.checkpoint.core.plan import MEMORY, Branch, Committed, Plan, Sealed, choose
from everstep.checkpoint.core.rotation import ROTATING
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.segments import Segment, SegmentSet
from everstep.checkpoint.shelf_shown import rows
from everstep.errors import MemoryShortage, ProtocolError
from everstep.events import Notice, TierEvent
from everstep.recovery.api import Child, Host, Message
from everstep.recovery.core.words import Roster

SLICE = 64 << 20
"""Bytes allocated in one turn of the agent's loop: about 20 ms."""

Older = Callable[[], Sequence[Committed]]
"""What slower tiers have committed, whole worlds each, in any order. Called on the agent's thread; must not block."""


Hold = tuple[int, int]
"""A buffer, and the number of a worker's hold of it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker waits for buffers."""

    rank: int
    number: int
    have: frozenset[int]


class Shelf:
    """The memory tier as a companion of the agent, before the slower tiers' companions: they read its plan.

    `readers`: slower tiers that read buffers at their own pace. `older` may be set later: a tier that needs this shelf
    is made after it.
    """

    prefix = "snapshot"
    _unable: frozenset[str] = frozenset()  # see `plan.choose`

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        readers: int = 1,
        older: Older | None = None,
        look: Callable[[], Memory] = memory.read,
    ) -> None:
        self._cap = cap_bytes
        self._buffers = ROTATING + readers
        self.older = older
        self._look = look
        self.changed: Callable[[], None] = lambda: None  # buffers were made, or are to be freed
        self._sets: dict[int, SegmentSet] = {}
        self._next_buffer: defaultdict[int, int] = defaultdict(int)
        self._next_set = 0
        self._held: defaultdict[int, set[int]] = defaultdict(set)  # by a slower tier, here
        self._offered: defaultdict[int, set[Hold]] = defaultdict(
            set
        )  # kept by its worker for one that is still to come
        self._newest_hold: dict[tuple[int, int], int] = {}  # of a rank and buffer: the last that we have heard of
        self._asks: list[Ask] = []
        self._branches: list[Branch] = []
        self._struck: set[tuple[int, int]] = set()
        self._struck_older: set[tuple[str, int]] = set()
        self._begun_from: dict[int, int] = {}  # by a world of another size: rank → buffer, of the world that saved
        self._unsettled: set[int] = set()  # ranks that have no snapshot of their own since
        self._told: int | None = None
        self._host_given: Host | None = None
        self.plan: Plan | None = None

    # What the disk tier asks for.

    def fd(self, rank: int, buffer: int) -> int:
        """Return the descriptor of a buffer; ours, valid while the buffer is held or its rank needs it."""
        return self._segment(rank, buffer).fd

    def header(self, rank: int, buffer: int) -> Header | str:
        """Return what a buffer says of itself, or why it says nothing."""
        return self._segment(rank, buffer).header()

    def hold(self, rank: int, buffer: int, offer: int = 0) -> None:
        """Keep a buffer as it is until `release`; `offer`: the number of the worker's hold that was for this."""
        self._segment(rank, buffer)
        self._held[rank].add(buffer)
        self._offered[rank].discard((buffer, offer))

    def release(self, rank: int, buffer: int, offer: int = 0) -> None:
        """The reader is done, or gone; or, with `offer`, nobody will read by that hold of the worker's. Twice is once.

        The buffer may be written again when neither is left: what was kept for another reader stays (two tiers may
        want one snapshot, and the first be done before the second has asked).
        """
        if buffer not in self.held(rank):
            return
        if offer:
            self._offered[rank].discard((buffer, offer))
        else:
            self._held[rank].discard(buffer)
        if buffer not in self.held(rank):
            self._send_released(rank, buffer)
            self._forget_retired()

    def ready(self) -> dict[tuple[int, int], int]:
        """Return the descriptors, ours, of all buffers that are in use or will be, by rank and number."""
        sets = [each for each in self._sets.values() if each.ready and not each.retired]
        return {(each.rank, number): segment.fd for each in sets for number, segment in each.segments.items()}

    def _send_released(self, rank: int, buffer: int) -> None:
        """Say with it how much we have heard: the worker may keep the buffer anew meanwhile."""
        heard = self._newest_hold.get((rank, buffer), 0)
        self._host.send(rank, {"kind": "snapshot.released", "buffer": buffer, "hold": heard})

    def held(self, rank: int) -> frozenset[int]:
        """Return the buffers of a rank that are held."""
        begun_from = {self._begun_from[rank]} if rank in self._begun_from else set[int]()
        return frozenset(self._held[rank] | {buffer for buffer, _ in self._offered[rank]} | begun_from)

    @property
    def bytes(self) -> int:
        """What the snapshots of this node take."""
        return sum(each.bytes for each in self._sets.values())

    # The agent.

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host_given = host

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""
        del fds  # workers send us none
        match message["kind"]:
            case "snapshot.attach":
                self._attach(Ask(rank, message["ask"], frozenset(message["have"])), message["bytes"])
            case "snapshot.hold":
                hold = int(message["buffer"]), int(message["hold"])
                self._offered[rank].add(hold)
                self._newest_hold[rank, hold[0]] = hold[1]
            case "snapshot.outgrown":
                for number in self._sets.keys() & message["sets"]:
                    self._sets[number].retired = True
                self._forget_retired()
            case "snapshot.damaged":
                self._strike(int(message.get("of", rank)), message)
            case "snapshot.open":
                self._open(rank, message["ask"])
            case "snapshot.settled":
                self._settled(rank)
            case other:
                raise ProtocolError(f"rank {rank} sent {other!r} to the memory tier; it knows attach, hold, outgrown, "
                                    "damaged, open, settled. Worker and agent are of different versions.")  # fmt: skip

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`: the memory tier has no helpers."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`: whoever waited for buffers is gone or asks again."""
        del generation
        self._asks.clear()

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`: what each rank begins from."""
        self._asks.clear()
        self._offered.clear()  # whoever offered them has unwound; what a tier took from it is held
        self._newest_hold.clear()  # another process counts its own; what is told at `attach` stands for all of these
        self._forget_retired()
        older = [c for c in (self.older() if self.older else ()) if (c.tier, c.step) not in self._struck_older]
        plan = choose(roster.world_size, self.sealed(), self._branches, older, frozenset(self._struck), self._unable)
        for rank, buffer in plan.void:
            if buffer not in self.held(rank):  # a reader of it keeps it; its lineage keeps it out of every plan
                self._void(rank, buffer)
        self._struck.clear()
        other = plan.tier == MEMORY and plan.saved_by != roster.world_size
        self._begun_from = dict(plan.sources) if other else {}
        self._unsettled = set(range(roster.world_size)) if other else set()
        if plan.tier == MEMORY and not other:
            self._let_go_of_the_lost(roster.world_size)
        self._branches.append(Branch(roster.epoch, roster.generation, plan.parent))
        self.plan = plan
        lineage = [roster.epoch, roster.generation, plan.parent]
        told = {"lineage": lineage, "reason": plan.reason, "unfit": plan.unfit}
        size = roster.world_size
        return {r: {**told, "restore": _source(plan, r, size), "held": sorted(self.held(r))} for r in range(size)}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`: goes on with allocations."""
        del now
        self._proceed()

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`: a snapshot is done when it is sealed."""
        del completed
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()

    def close(self) -> None:
        """See `Companion.close`."""
        for each in self._sets.values():
            each.close()
        self._sets.clear()

    def shown(self) -> Sequence[Message]:
        """See `recovery.api.ShownCompanion`."""
        return rows(self._sets.values())

    def sealed(self) -> list[Sealed]:
        """Read the headers of all buffers: what is sealed, oldest first."""
        found: list[tuple[int, Sealed]] = []
        for each in self._sets.values():
            for buffer, segment in each.segments.items():
                h = segment.header()
                if isinstance(h, Header) and h.rank == each.rank:
                    snapshot = Sealed(h.rank, buffer, h.step, h.epoch, h.generation, h.parent, h.world_size)
                    found.append((h.sequence, snapshot))
        return [snapshot for _, snapshot in sorted(found, key=lambda entry: entry[0])]

    def sealed_here(self) -> list[Sealed]:
        """Return the same of this node alone."""
        return Shelf.sealed(self)

    # Inside.

    @property
    def _host(self) -> Host:
        assert self._host_given is not None, "start() comes first"
        return self._host_given

    def _segment(self, rank: int, buffer: int) -> Segment:
        for each in self._sets.values():
            if each.rank == rank and buffer in each.segments:
                return each.segments[buffer]
        raise ProtocolError(f"rank {rank} has no snapshot buffer {buffer}; it was released, or never was.")

    def _void(self, rank: int, buffer: int) -> None:
        self._segment(rank, buffer).void()

    def _of(self, rank: int) -> list[SegmentSet]:
        return [each for each in self._sets.values() if each.rank == rank]

    def _open(self, rank: int, ask: int) -> None:
        """Hand out, for reading, what this generation began from."""
        ranks = sorted(self._begun_from)
        fds = [self.fd(source, self._begun_from[source]) for source in ranks]
        body = {"kind": "snapshot.opened", "ask": ask, "ranks": ranks, "buffers": [self._begun_from[r] for r in ranks]}
        self._host.send(rank, body, fds)

    def _settled(self, rank: int) -> None:
        """A rank has sealed a snapshot of this world. When all have, the other world's are needed no more."""
        self._unsettled.discard(rank)
        if self._unsettled or not self._begun_from:
            return
        begun_from, self._begun_from = self._begun_from, {}
        for source, buffer in begun_from.items():
            if source < self._host.world_size and buffer not in self.held(source):
                self._send_released(source, buffer)
        self._let_go_of_the_lost(self._host.world_size)

    def _let_go_of_the_lost(self, world_size: int) -> None:
        """Ranks that are no more leave nothing that is needed."""
        for each in self._sets.values():
            each.retired = each.retired or each.rank >= world_size
        self._forget_retired()

    def _attach(self, ask: Ask, needed: int) -> None:
        mine = [each for each in self._of(ask.rank) if not each.lent]
        if not mine or mine[-1].size < needed:
            refusal = self._refusal(ask.rank, needed)
            if refusal is not None:
                self._refuse(ask, refusal)
                return
            first = self._next_buffer[ask.rank]
            self._next_buffer[ask.rank] = first + self._buffers
            self._sets[self._next_set] = SegmentSet(
                self._next_set, ask.rank, needed, range(first, first + self._buffers)
            )
            self._next_set += 1
            if mine:
                text = f"rank {ask.rank} outgrew its buffers of {size(mine[-1].size)}: {size(needed)} each from now on"
                self._host.emit(TierEvent(tier=MEMORY, what="grown", step=0, bytes=needed, text=text))
        self._asks.append(ask)
        self._proceed()

    def _refusal(self, rank: int, needed: int) -> str | None:
        """Judge what this rank asks for, and that the others will ask for as much."""
        here = self._ranks_here()
        ranks = len(here)
        planned = {each.rank for each in self._sets.values() if each.size >= needed}
        missing = len(set(here) - planned | {rank}) * self._buffers * needed
        need = Need(ranks, self._buffers, needed, missing, self.bytes)
        found = self._look()
        if self._told != needed:
            self._told = needed
            self._host.emit(Notice(text=f"snapshots in memory: {need}; {size(found.available)} are available"))
        return shortage(need, found, self._cap)

    def _ranks_here(self) -> Sequence[int]:
        return range(self._host.world_size)

    def _beside(self, rank: int) -> Message:
        """What a rank is told with its buffers."""
        del rank
        return {}

    def _refuse(self, ask: Ask, text: str) -> None:
        self._host.emit(Notice(level="error", text=f"rank {ask.rank}: {text}"))
        self._host.send(ask.rank, {"kind": "snapshot.refused", "ask": ask.number, "text": text})

    def _proceed(self) -> None:
        """Allocate a slice, and answer whoever has waited for what is complete."""
        left = SLICE
        for each in [s for s in self._sets.values() if not s.ready]:
            try:
                left -= each.allocate(left)
            except MemoryShortage as error:
                self._give_up(each, str(error))
        waiting = self._asks
        self._asks = [ask for ask in waiting if not self._answer(ask)]
        if len(self._asks) < len(waiting):
            self.changed()
        if any(not each.ready for each in self._sets.values()):
            self._host.later(0.0)

    def _answer(self, ask: Ask) -> bool:
        mine = self._of(ask.rank)
        if not all(each.ready for each in mine):
            return False
        sets: list[dict[str, Any]] = []
        fds: list[int] = []
        for each in mine:
            sent = each.number not in ask.have
            sets.append({"set": each.number, "bytes": each.size, "buffers": list(each.segments), "sent": sent})
            fds += [segment.fd for segment in each.segments.values()] if sent else []
        body = {"kind": "snapshot.buffers", "ask": ask.number, "sets": sets, "held": sorted(self.held(ask.rank))}
        self._host.send(ask.rank, {**body, **self._beside(ask.rank)}, fds)
        return True

    def _give_up(self, each: SegmentSet, text: str) -> None:
        del self._sets[each.number]
        each.close()
        for ask in [a for a in self._asks if a.rank == each.rank]:
            self._asks.remove(ask)
            self._refuse(ask, text)

    def _strike(self, rank: int, message: Message) -> None:
        """A restore could not read its source (EXPERIMENTS M11)."""
        tier, step, why = message.get("tier", MEMORY), message["step"], str(message["why"])
        if tier == MEMORY:
            self._struck.add((rank, message["buffer"]))
        else:
            self._struck_older.add((tier, step))
        self._host.emit(TierEvent(tier=tier, what="damaged", step=step, text=f"rank {rank}: {why}"))

    def _forget_retired(self) -> None:
        for number, each in list(self._sets.items()):
            if each.retired and not self.held(each.rank) & each.segments.keys():
                del self._sets[number]
                each.close()
                self.changed()


def _source(plan: Plan, rank: int, world_size: int) -> dict[str, Any] | None:
    if plan.step is None:
        return None
    if plan.committed is None and len(plan.sources) != world_size:
        return {"step": plan.step, "tier": MEMORY, "saved_by": len(plan.sources)}
    if plan.committed is None:
        return {"step": plan.step, "tier": MEMORY, "buffer": plan.sources[rank]}
    return {"step": plan.step, "tier": plan.tier, **plan.committed.where}
