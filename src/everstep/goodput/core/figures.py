"""The figures of a run, each defined once. The same words stand in the report and in docs/goodput.md.

* retained steps: steps whose execution stands on every rank at the end.
* fault-free step time: the median of the twin run's steps if a twin is given, else of this run's own steps outside the
  first 3 of each generation (all steps where no generation has more); of the step alone, without data wait and
  snapshot. The report says which (EXPERIMENTS L4).
* training goodput = retained steps x fault-free step time / wall time.
* infra goodput = (wall - (detection + stop + regroup + start-up, per fault)) / wall, over all ranks' time. The first
  start of the run is not a fault's.
* checkpoint efficiency = 1 - (snapshot + checkpoint stall) / wall, over all ranks' time, quoted with each tier's
  achieved interval and the age of its newest state (tiers.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from everstep.events import Category
from everstep.goodput.core.axis import to_s
from everstep.goodput.core.lanes import Done, Lane
from everstep.goodput.core.standing import stood
from everstep.goodput.core.story import Story

WARM_UP_STEPS = 3
INFRA = (Category.DETECTION, Category.STOP, Category.REGROUP, Category.STARTUP)
UNKNOWN = (
    "the script does not use the library: its time, from its first line to its end, is told as one (script); steps, "
    "what a fault undid and training goodput are unknown"
)
BLOCKED = (Category.SNAPSHOT, Category.CHECKPOINT_STALL)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run comes to. Ratios are None where nothing can be said yet."""

    wall_s: float
    steps: int | None  # retained; None: the script does not use the library, so that no step is known
    executions: int  # of steps, on the rank that did most
    step_s: float | None
    step_source: str
    training_goodput: float | None
    infra_goodput: float | None
    checkpoint_efficiency: float | None
    notes: tuple[str, ...] = ()


def figures(story: Story, lanes: Sequence[Lane], floor: Sequence[int | None], twin_step_s: float | None) -> Figures:
    """Compute them; `floor` is each generation's (standing.floors)."""
    wall_s = to_s(sum(s.end - s.start for s in story.sessions))
    whole = sum(p.end - p.start for lane in lanes for p in lane.intervals)
    told = [lane for lane in lanes if lane.rank not in story.elsewhere] or lanes
    standing = [{d.step for d in lane.done if stood(d.step, floor[d.generation])} for lane in told]
    steps = len(set.intersection(*standing)) if standing else 0
    step_s, source = _fault_free(story, lanes, twin_step_s)
    harm = _first_harm(story)
    infra = sum(p.end - p.start for lane in lanes for p in lane.intervals if p.category in INFRA and p.start >= harm)
    blocked = sum(p.end - p.start for lane in lanes for p in lane.intervals if p.category in BLOCKED)
    goodput, notes = _goodput(steps, step_s, wall_s)
    known = bool(steps) or any(s.opened.wrapped for s in story.sessions)
    if not known:
        notes = (*notes, UNKNOWN)
    elif step_s is None:
        notes = (*notes, "no step was recorded: a script without run.steps() shows as start-up, and has no goodput")
    return Figures(
        wall_s=wall_s, steps=steps if known else None, executions=max((len(lane.done) for lane in lanes), default=0),
        step_s=step_s, step_source=source, training_goodput=goodput,
        infra_goodput=1 - infra / whole if whole else None,
        checkpoint_efficiency=1 - blocked / whole if whole and known else None, notes=notes,
    )  # fmt: skip


def _first_harm(story: Story) -> int:
    """From when on start-up and regroup are a fault's: before it they are the run's own first start."""
    starts = [g.start for g in story.generations[1:]] + [s.start for s in story.sessions[1:]]
    return min([story.sessions[-1].end, *starts, *(g.broken.instant for g in story.generations if g.broken)])


def _goodput(steps: int, step_s: float | None, wall_s: float) -> tuple[float | None, tuple[str, ...]]:
    if step_s is None or not wall_s:
        return None, ()
    share = steps * step_s / wall_s
    if share <= 1:
        return share, ()
    text = (
        f"{steps} steps of {step_s:.4f} s would take longer than the run did ({share:.1%}); goodput is shown as 100 %"
    )
    return 1.0, (text,)


def _fault_free(story: Story, lanes: Sequence[Lane], twin_step_s: float | None) -> tuple[float | None, str]:
    if twin_step_s is not None:
        return twin_step_s, "median of the fault-free twin"
    samples = [d for lane in lanes for d in lane.done if not _in_detection(story, d)]
    settled = [d for lane in lanes for d in _settled(lane)]
    chosen = [d.seconds for d in settled if not _in_detection(story, d)]
    if chosen:
        return median(chosen), f"median of this run's steps outside the first {WARM_UP_STEPS} of each generation"
    if samples:
        return median(d.seconds for d in samples), "median of all of this run's steps; no generation has more than 3"
    return None, "no step was recorded"


def _settled(lane: Lane) -> list[Done]:
    seen: dict[int, int] = {}
    kept: list[Done] = []
    for done in lane.done:
        seen[done.generation] = seen.get(done.generation, 0) + 1
        if seen[done.generation] > WARM_UP_STEPS:
            kept.append(done)
    return kept


def _in_detection(story: Story, done: Done) -> bool:
    broken = story.generations[done.generation].broken
    return broken is not None and done.at > broken.instant


def median_step_s(story: Story, lanes: Sequence[Lane]) -> float | None:
    """Return what this run would lend another as its twin."""
    return _fault_free(story, lanes, None)[0]
