"""What each fault cost: from its instant on the injured rank to the end of the first new step on all ranks.

The way back has seven parts that lie end to end on the world's time, each closed by the slowest rank:

    detect    instant of the fault           -> its record
    stop      record                         -> the last rank that could arrive has arrived
    regroup   last arrival                   -> every rank has its roster, process and process groups
    rebuild   groups made                    -> every rank begins to restore (the user's own set-up)
    restore   restore begun                  -> every rank has its state
    redo      state restored                 -> every rank is where the world was when the fault hit
    new step  there                          -> the first new step is done on all ranks

A new step is one that had not been done on all ranks before the fault. A second fault before the way back is over
lengthens it: then both rows hold that time, and the ranks' seconds hold it once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from everstep.events import Category, FaultInjected
from everstep.goodput.core.axis import to_s
from everstep.goodput.core.lanes import LOOP, Lane, LaneReader
from everstep.goodput.core.story import Break, Generation, Story

TRAINING = (*LOOP, Category.LOST)
OVER = (Category.COMPLETION, Category.TAIL)
OUTSIDE = (Category.STARTUP, Category.REGROUP, Category.DETECTION, Category.STOP)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault and the way back. Parts that were never reached are None.

    `step` is the plan's where our injector did it, else the one that was in flight: the first not done on all ranks.
    A script without the library tells no steps: `step` and `steps_lost` are None, and see `_begun_anew`.
    """

    step: int | None
    rank: int | None
    type: str
    noticed_by: str
    detect_s: float | None
    stop_s: float | None
    regroup_s: float | None
    rebuild_s: float | None
    restore_s: float | None
    redo_s: float | None
    new_step_s: float | None
    recovery_s: float | None
    steps_lost: int | None
    restored_from: str | None
    instant: int
    noticed: int
    recovered: int | None
    generation: int
    took_over: (
        str  # kept | spare | started: who holds the injured rank afterwards; shrunk: the world goes on without it
    )
    text: str


def recoveries(story: Story, reader: LaneReader, lanes: Sequence[Lane]) -> list[Recovery]:
    """Return one row for each fault, in order of time."""
    found: list[Recovery] = []
    for generation in story.generations:
        if generation.broken is not None:
            found += _rows(story, reader, lanes, generation, generation.broken)
    return sorted(found, key=lambda r: r.instant)


def _rows(
    story: Story, reader: LaneReader, lanes: Sequence[Lane], generation: Generation, broken: Break
) -> list[Recovery]:
    harms: list[tuple[int, FaultInjected | None]] = [*broken.injected] or [(broken.instant, None)]
    return [_row(story, reader, lanes, generation, broken, at, harm) for at, harm in harms]


def _row(
    story: Story, reader: LaneReader, lanes: Sequence[Lane], generation: Generation, broken: Break,
    instant: int, harm: FaultInjected | None,
) -> Recovery:  # fmt: skip
    index = generation.index
    following = story.generations[index + 1] if index + 1 < len(story.generations) else None
    world = _world_step(lanes, generation)
    wrapped = story.sessions[generation.session].opened.wrapped
    noticed = max(broken.noticed, instant)
    marks = (
        _marks(story, reader, lanes, generation, world, noticed)
        if wrapped
        else _begun_anew(story, reader, generation, noticed)
    )
    recovered = marks[5] if wrapped else marks[1]
    parts = _parts([instant, noticed, *marks])
    cause = broken.cause
    rank = harm.injured_rank if harm else cause.injured_rank
    return Recovery(
        step=harm.step if harm else world + 1 if wrapped else None,
        rank=rank, type=harm.type if harm else cause.kind, noticed_by=broken.first.noticed_by,
        detect_s=parts[0], stop_s=parts[1], regroup_s=parts[2], rebuild_s=parts[3], restore_s=parts[4],
        redo_s=parts[5], new_step_s=parts[6],
        recovery_s=to_s(recovered - instant) if recovered is not None else None,
        steps_lost=max(0, world - following.restore_step) if following is not None and wrapped else None,
        restored_from=(following.restored_from or "the beginning") if following is not None and wrapped else None,
        instant=instant, noticed=noticed, recovered=recovered, generation=index,
        took_over=_taken(generation, following, rank), text=cause.text or broken.first.text,
    )  # fmt: skip


def _taken(generation: Generation, following: Generation | None, rank: int | None) -> str:
    """Who holds the injured rank afterwards; in a smaller world a lost process's rank is another's, or nobody's."""
    if following is None or rank is None:
        return ""
    before, after = generation.seats.get(rank), following.seats.get(rank)
    left = before is not None and before.pid not in {seat.pid for seat in following.seats.values()}
    if left and len(following.seats) < len(generation.seats):
        return "shrunk"
    return after.why if after is not None else ""


def _parts(ends: Sequence[int | None]) -> list[float | None]:
    """Lengths between neighbours."""
    return [None if a is None or b is None else to_s(b - a) for a, b in pairwise(ends)]


def _world_step(lanes: Sequence[Lane], generation: Generation) -> int:
    """The last step done on all ranks when `generation` ended."""
    steps = [
        max((d.step for d in lane.done if d.generation == generation.index), default=generation.restore_step)
        for lane in lanes
        if lane.rank in generation.seats
    ]
    return min(steps, default=generation.restore_step)


def _marks(
    story: Story, reader: LaneReader, lanes: Sequence[Lane], generation: Generation, world: int, noticed: int
) -> list[int | None]:
    """Ends of stop, regroup, rebuild, restore, redo and the new step."""
    arrived = [at for at in reader.arrivals(generation).values() if at is not None]
    stop = max([noticed, *arrived])
    back = _recovering(story, lanes, generation, world)
    if back is None:
        reached = stop if not generation.last else None
        return [reached, None, None, None, None, None]
    here = [lane for lane in lanes if lane.rank in back.seats]
    regroup = _slowest(here, lambda lane: _first(lane, back, lambda c: c not in OUTSIDE))
    rebuild = _slowest(here, lambda lane: _first(lane, back, lambda c: c is Category.RESTORE or c in TRAINING))
    restore = _slowest(here, lambda lane: _restored(lane, back))
    redo = _slowest(here, lambda lane: _done(lane, back, world)) if back.restore_step < world else restore
    new = _slowest(here, lambda lane: _new(lane, back, world))
    return _rising([stop, regroup, rebuild, restore, redo, new])


def _begun_anew(story: Story, reader: LaneReader, generation: Generation, noticed: int) -> list[int | None]:
    """The same marks of a script without the library: its way back is over when all ranks have begun it anew.

    That counts only where a later start ran on: to exit code 0, or until now. What it does again is not known.
    """
    arrived = [at for at in reader.arrivals(generation).values() if at is not None]
    stop = max([noticed, *arrived])
    later = story.generations[generation.index + 1 :]
    closed = story.sessions[-1].closed
    if not later or later[-1].broken is not None or (closed is not None and closed.code != 0):
        return [stop if later else None, None, None, None, None, None]
    return [stop, max(stop, later[0].start), None, None, None, None]


def _rising(marks: Sequence[int | None]) -> list[int | None]:
    """No part ends before the one that it follows; one that left no trace takes no time."""
    reached = max((i for i, mark in enumerate(marks) if mark is not None), default=-1)
    top = 0
    out: list[int | None] = []
    for position, mark in enumerate(marks):
        top = max(top, mark or 0)
        out.append(top if position <= reached else None)
    return out


def _recovering(story: Story, lanes: Sequence[Lane], generation: Generation, world: int) -> Generation | None:
    """The generation in which the first new step got done on all ranks, else the last one."""
    later = story.generations[generation.index + 1 :]
    for candidate in later:
        here = [lane for lane in lanes if lane.rank in candidate.seats]
        if all(_new(lane, candidate, world) is not None for lane in here):
            return candidate
    return later[-1] if later else None


def _slowest(lanes: Sequence[Lane], when: Callable[[Lane], int | None]) -> int | None:
    found = [when(lane) for lane in lanes]
    known = [at for at in found if at is not None]
    return max(known) if known and len(known) == len(found) else None


def _first(lane: Lane, generation: Generation, wanted: Callable[[Category | None], bool]) -> int | None:
    """When the lane first was in a wanted category after its roster."""
    return next(
        (p.start for p in lane.intervals if p.generation == generation.index and wanted(p.category)), None
    )  # fmt: skip


def _restored(lane: Lane, generation: Generation) -> int | None:
    """When the lane's state was whole: the end of its first restore, or its first step where it had none."""
    restore = next(
        (p.end for p in lane.intervals if p.generation == generation.index and p.category is Category.RESTORE), None
    )
    return restore if restore is not None else _first(lane, generation, lambda c: c in TRAINING)


def _done(lane: Lane, generation: Generation, step: int) -> int | None:
    """When the lane had done `step` in this generation."""
    return next((d.at for d in lane.done if d.generation == generation.index and d.step >= step), None)


def _new(lane: Lane, generation: Generation, world: int) -> int | None:
    """When the lane had done the first new step; where none was left to do, when its function was over."""
    done = _done(lane, generation, world + 1)
    if done is not None or generation.broken is not None:
        return done
    return _first(lane, generation, lambda c: c in OVER)
