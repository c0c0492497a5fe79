"""From which state a generation begins: the newest step that every rank of the world can have from somewhere.

Rule 1: all ranks begin from one step of one lineage, or the plan names none.
Rule 2: a snapshot counts only if it lies on the living line: it was made by a generation of this run, and every later
    generation began from its step or a later one. What a rollback left behind is void (EXPERIMENTS M3).
Rule 3: newest first; of equal steps the nearest tier first, memory before all others.
Rule 4: what was struck out (a restore could not read it) does not exist (M11).
Rule 5: state of a world of another size counts like any other where all ranks that saved it can be had: whoever takes
    it reshards (core/reshard.py). A tier that cannot hand out the others' parts (`unable`) has it not; where such
    state is newer than what is taken, the plan says so. Of equal steps the present size first.
Rule 6: a state from which generation after generation began and none came further is suspected: after `PATIENCE` of
    them an older durable one is taken, else an older one in memory, while there is any (CL-17).
Rule 7: the decision comes with its reason, and with the buffers that it voids.

The plan does not know where the bytes are; it knows ranks and buffer numbers.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from everstep.checkpoint.core.segment import FROM_THE_BEGINNING
from everstep.ranks import brief

MEMORY = "memory"
PATIENCE = 4
"""So many generations in a row may begin from one state in memory."""

_Key = tuple[int, bool, int, int, int]
"""Step, whether of the present size, epoch, generation, size: the greatest is the best."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One sealed snapshot in the memory of one rank."""

    rank: int
    buffer: int
    step: int
    epoch: int
    generation: int
    parent: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Committed:
    """One checkpoint of a slower tier that covers the whole world and is committed."""

    step: int
    tier: str
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])  # handed to the ranks as it is
    world_size: int | None = None  # of the world that saved it; None: it fits any


@dataclass(frozen=True, slots=True)
class Branch:
    """A generation of this run, and the step it began from."""

    epoch: int
    generation: int
    parent: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a generation begins from. `step` is None where it begins from the beginning."""

    step: int | None
    tier: str | None
    reason: str
    sources: Mapping[int, int] = field(default_factory=dict[int, int])  # rank -> buffer, for the memory tier
    committed: Committed | None = None
    void: tuple[tuple[int, int], ...] = ()  # (rank, buffer) of all that the new generation leaves behind
    unfit: str = ""  # newer state than this, which a world of another size has left and which cannot be had whole
    saved_by: int | None = None  # size of the world whose state it is, where that is known

    @property
    def parent(self) -> int:
        """What the snapshots of the new generation name as their parent."""
        return FROM_THE_BEGINNING if self.step is None else self.step


def living(snapshot: Sealed, branches: Sequence[Branch]) -> bool:
    """True when the snapshot lies on the line that led to the last of `branches`."""
    made_by = (snapshot.epoch, snapshot.generation)
    born = any((b.epoch, b.generation, b.parent) == (*made_by, snapshot.parent) for b in branches)
    return born and all(snapshot.step <= b.parent for b in branches if (b.epoch, b.generation) > made_by)


def choose(
    world_size: int,
    sealed: Iterable[Sealed],
    branches: Sequence[Branch],
    older: Iterable[Committed] = (),
    struck: Set[tuple[int, int]] = frozenset(),
    unable: Set[str] = frozenset(),
) -> Plan:
    """Decide. `branches` are the generations so far, in order; `older` what slower tiers hold, whole worlds each.

    `unable`: tiers that hand a rank nothing but its own part. Of two snapshots of one rank, step and generation
    the later in `sealed` is taken.
    """
    snapshots, committed = list(sealed), list(older)
    usable = [
        s for s in snapshots
        if (s.world_size == world_size or MEMORY not in unable) and (s.rank, s.buffer) not in struck
        and living(s, branches)
    ]  # fmt: skip
    within = [c for c in committed if c.world_size in (None, world_size) or c.tier not in unable]
    sources: defaultdict[_Key, dict[int, int]] = defaultdict(dict)
    for s in usable:
        sources[s.step, s.world_size == world_size, s.epoch, s.generation, s.world_size][s.rank] = s.buffer
    whole = sorted(key for key, ranks in sources.items() if len(ranks) == key[-1])
    fallback = max(within, key=lambda c: (c.step, c.world_size == world_size), default=None)
    plan = _decided(world_size, usable, sources, whole, fallback)
    suspected = _suspected(plan, branches)
    if suspected:
        whole = [] if fallback is not None else [key for key in whole if key[0] < (plan.step or 0)]
        if whole or fallback is not None:
            plan = _decided(world_size, usable, sources, whole, fallback)
            plan = replace(plan, reason=f"{plan.reason}; {suspected}")
    alive = {(s.rank, s.buffer) for s in usable if s.step <= plan.parent}
    void = tuple(sorted((s.rank, s.buffer) for s in snapshots if (s.rank, s.buffer) not in alive))
    others = [(s.step, MEMORY, s.world_size) for s in snapshots if s.world_size != world_size and living(s, branches)]
    if MEMORY not in unable and plan.step is not None:
        others = []  # what is not whole of it is told already
    others += [(c.step, c.tier, c.world_size or 0) for c in committed if c not in within]
    unfit = _unfit([other for other in others if other[0] > max(plan.step or 0, 0)])
    return replace(plan, reason=f"{plan.reason}; {unfit}" if unfit else plan.reason, void=void, unfit=unfit)


def _decided(
    world_size: int,
    usable: Sequence[Sealed],
    sources: Mapping[_Key, dict[int, int]],
    whole: Sequence[_Key],
    fallback: Committed | None,
) -> Plan:
    best = whole[-1] if whole else None
    if best is not None and (fallback is None or best[0] >= fallback.step):
        return Plan(best[0], MEMORY, _why_memory(best, sources, world_size), dict(sources[best]), saved_by=best[-1])
    if fallback is not None:
        reason = _why_older(fallback, usable, best, world_size)
        return Plan(fallback.step, fallback.tier, reason, {}, fallback, saved_by=fallback.world_size)
    return Plan(None, None, "from the beginning: " + _why_not_memory(usable, world_size) + "; no older tier has one")


def _suspected(plan: Plan, branches: Sequence[Branch]) -> str:
    """Say why a state in memory is not trusted any more, where it is not."""
    if plan.tier != MEMORY:
        return ""
    again = len(list(takewhile(lambda branch: branch.parent == plan.step, reversed(branches))))
    if again < PATIENCE:
        return ""
    return f"step {plan.step} in memory is suspected: {again} generations in a row began from it and came no further"


def _unfit(others: Sequence[tuple[int, str, int | None]]) -> str:
    """Say which state of another world is the newest in each tier."""
    newest = {tier: max(o for o in others if o[1] == tier) for tier in dict.fromkeys(tier for _, tier, _ in others)}
    places = {tier: "in memory" if tier == MEMORY else f"on {tier}" for tier in newest}
    return " and ".join(f"step {step} {places[tier]} is of {size} ranks" for step, tier, size in newest.values())


def _why_memory(best: _Key, sources: Mapping[_Key, object], world_size: int) -> str:
    step, _, epoch, generation, size = best
    text = f"step {step} from memory: the newest that all {size} ranks hold, of lineage {epoch}.{generation}"
    newer = sorted({key[0] for key in sources if key > best})
    text = f"{text}; step {newer[-1]} is not whole" if newer and newer[-1] > step else text
    return text if size == world_size else f"{text}; {_taken_up(world_size)}"


def _taken_up(world_size: int) -> str:
    return f"{world_size} {'rank takes' if world_size == 1 else 'ranks take'} it up"


def _why_older(chosen: Committed, usable: Sequence[Sealed], best: _Key | None, world_size: int) -> str:
    if best is not None:
        text = f"step {chosen.step} from {chosen.tier}: newer than step {best[0]}, the newest whole one in memory"
    else:
        text = f"step {chosen.step} from {chosen.tier}: {_why_not_memory(usable, world_size)}"
    if chosen.world_size in (None, world_size):
        return text
    return f"{text}; it was saved by {chosen.world_size} ranks, and {_taken_up(world_size)}"


def _why_not_memory(usable: Sequence[Sealed], world_size: int) -> str:
    if not usable:
        return "memory holds no snapshot"
    size = world_size if any(s.world_size == world_size for s in usable) else usable[-1].world_size
    usable = [s for s in usable if s.world_size == size]
    lacking = set(range(size)) - {s.rank for s in usable}
    if lacking:
        return f"memory holds no snapshot of rank {brief(lacking)}" + (f" of {size}" if size != world_size else "")
    newest = {r: max(s.step for s in usable if s.rank == r) for r in range(size)}
    slow, fast = min(newest, key=lambda r: newest[r]), max(newest, key=lambda r: newest[r])
    if newest[slow] == newest[fast]:
        return f"what memory holds, up to step {newest[fast]}, is not taken"
    return (
        f"memory holds no step of all ranks (newest: step {newest[slow]} on rank {slow}, step {newest[fast]} on rank "
        f"{fast}); ranks that share no collective in a step run apart"
    )
