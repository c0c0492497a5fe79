"""From which state a generation begins: the newest step that every rank of the world can have from somewhere.

Rule 1: all ranks begin from one step of one lineage, or the plan names none.
Rule 2: a snapshot counts only if it lies on the living line: it was made by a generation of this run, and every later
    generation began from its step or a later one. What a rollback left behind is void (EXPERIMENTS M3).
Rule 3: newest first; of equal steps the nearest tier first, memory before all others.
Rule 4: what was struck out (a restore could not read it) does not exist (M11).
Rule 5: the decision comes with its reason, and with the buffers that it voids.

The plan does not know where the bytes are; it knows ranks and buffer numbers.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.core.segment import FROM_THE_BEGINNING
from everstep.ranks import brief

MEMORY = "memory"


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
) -> Plan:
    """Decide. `branches` are the generations so far, in order; `older` what slower tiers hold, whole worlds each.

    Of two snapshots of one rank, step and generation the later in `sealed` is taken.
    """
    snapshots = list(sealed)
    usable = [
        s for s in snapshots
        if s.world_size == world_size and (s.rank, s.buffer) not in struck and living(s, branches)
    ]  # fmt: skip
    sources: defaultdict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    for s in usable:
        sources[s.step, s.epoch, s.generation][s.rank] = s.buffer
    whole = [key for key, ranks in sources.items() if len(ranks) == world_size]
    best = max(whole, default=None)
    fallback = max(older, key=lambda c: c.step, default=None)
    if best is not None and (fallback is None or best[0] >= fallback.step):
        plan = Plan(best[0], MEMORY, _why_memory(best, sources, world_size), dict(sources[best]))
    elif fallback is not None:
        plan = Plan(fallback.step, fallback.tier, _why_older(fallback, usable, best, world_size), {}, fallback)
    else:
        plan = Plan(
            None, None, "from the beginning: " + _why_not_memory(usable, world_size) + "; no older tier has one"
        )
    alive = {(s.rank, s.buffer) for s in usable if s.step <= plan.parent}
    void = tuple(sorted((s.rank, s.buffer) for s in snapshots if (s.rank, s.buffer) not in alive))
    return Plan(plan.step, plan.tier, plan.reason, plan.sources, plan.committed, void)


def _why_memory(best: tuple[int, int, int], sources: Mapping[tuple[int, int, int], object], world_size: int) -> str:
    step, epoch, generation = best
    text = f"step {step} from memory: the newest that all {world_size} ranks hold, of lineage {epoch}.{generation}"
    newer = sorted({key[0] for key in sources if key > best})
    return f"{text}; step {newer[-1]} is not whole" if newer else text


def _why_older(chosen: Committed, usable: Sequence[Sealed], best: tuple[int, int, int] | None, world_size: int) -> str:
    if best is not None:
        return f"step {chosen.step} from {chosen.tier}: newer than step {best[0]}, the newest whole one in memory"
    return f"step {chosen.step} from {chosen.tier}: {_why_not_memory(usable, world_size)}"


def _why_not_memory(usable: Sequence[Sealed], world_size: int) -> str:
    if not usable:
        return "memory holds no snapshot"
    lacking = set(range(world_size)) - {s.rank for s in usable}
    if lacking:
        return f"memory holds no snapshot of rank {brief(lacking)}"
    newest = {r: max(s.step for s in usable if s.rank == r) for r in range(world_size)}
    slow, fast = min(newest, key=lambda r: newest[r]), max(newest, key=lambda r: newest[r])
    return (
        f"memory holds no step of all ranks (newest: step {newest[slow]} on rank {slow}, step {newest[fast]} on rank "
        f"{fast}); ranks that share no collective in a step run apart"
    )
