"""The ledger: every second of every rank in exactly one category, judged in hindsight.

Whether a second was a useful step is known only after the next fault (EXPERIMENTS L1). So accounting is a second pass
over the lanes, and the answer is a pure function of the records: live or from logs, it is the same.

Precedence, strongest first:
1. detection, stop, regroup of a fault (lanes, rule 3): even over a step that a healthy rank finished meanwhile;
2. the innermost open span;
3. lost: a step that a later roster's restored state does not contain, and the part of a step that was never done;
4. the stage the rank was in.
A step that is done again counts as step, its first execution as lost: one of the two is waste, never both. So the
category "redo" stays empty here; a worker's own redo spans are steps. Only STEP time turns into lost: waiting for data,
snapshots and stalls keep their names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.events import Category, ProcessStarted, Record
from everstep.goodput.core.axis import to_ns, to_s
from everstep.goodput.core.comparable import differences
from everstep.goodput.core.figures import Figures, figures
from everstep.goodput.core.lanes import Interval, Lane, LaneReader
from everstep.goodput.core.recoveries import Recovery, recoveries
from everstep.goodput.core.standing import floors, stood
from everstep.goodput.core.story import Generation, Process, Seat, Story, read_story
from everstep.goodput.core.tiers import Tier, read_tiers


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's wall time by category; `unplaced_s` is an error of the ledger wherever it is not 0."""

    rank: int
    wall_s: float
    seconds: dict[Category, float]
    unplaced_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpareTime:
    """A warm process's idle time, apart from the ranks'."""

    name: str
    pid: int
    start: int
    end: int
    took: tuple[int, int] | None  # (rank, generation) it stepped in for


@dataclass(frozen=True, slots=True)
class Loss:
    """One value of the loss as the lowest rank logged it; `stands` is False where a rollback undid the step."""

    at: int
    step: int
    value: float
    generation: int
    stands: bool


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that a report shows. Moments are nanoseconds on the common axis."""

    story: Story
    lanes: list[Lane]
    ranks: list[RankTime]
    spares: list[SpareTime]
    recoveries: list[Recovery]
    figures: Figures
    tiers: list[Tier]
    losses: list[Loss]
    loss_name: str
    errors: list[str]
    notes: list[str]
    not_comparable: list[str]

    @property
    def start(self) -> int:
        """The run's first moment."""
        return self.story.sessions[0].start

    @property
    def end(self) -> int:
        """The run's last moment."""
        return self.story.sessions[-1].end

    @property
    def closed(self) -> bool:
        """Whether the agent said that the run is over; if not, all figures are as of the last record."""
        return self.story.sessions[-1].closed is not None


def account(
    records: Sequence[Record], *, until_s: float | None = None, twin_step_s: float | None = None, unread: int = 0
) -> Ledger:
    """Return the ledger of these records.

    `until_s`: present wall time of a run that is still going. `twin_step_s`: median step time of its fault-free twin.
    `unread`: lines that could not be read. Raises LedgerError where the records do not even say that a run began.
    """
    story = read_story(records, None if until_s is None else to_ns(until_s))
    reader = LaneReader(story)
    lanes = reader.read()
    floor = floors(story.generations)
    for lane in lanes:
        lane.intervals = _merged(_judged(lane.intervals, floor, story))
    ranks = [_rank_time(lane) for lane in lanes]
    name, losses = _losses(lanes, floor)
    shown = figures(story, lanes, floor, twin_step_s)
    notes = list(story.notes) + list(shown.notes)
    if unread:
        notes.append(f"{unread} lines of the ledger could not be read and count for nothing")
    if story.sessions[-1].closed is None:
        notes.append("no RunEnded: the run still goes on, or its agent was killed; figures are as of the last record")
    return Ledger(
        story=story, lanes=lanes, ranks=ranks, spares=_spares(story), recoveries=recoveries(story, reader, lanes),
        figures=shown, tiers=read_tiers(story), losses=losses, loss_name=name,
        errors=story.errors + _holes(story, lanes), notes=notes,
        not_comparable=differences([record for _, record in story.moments]),
    )  # fmt: skip


def _judged(parts: list[Interval], floor: list[int | None], story: Story) -> list[Interval]:
    """Turn the steps that did not stand into lost."""
    return [replace(p, category=Category.LOST) if _is_lost(p, floor, story) else p for p in parts]


def _is_lost(part: Interval, floor: list[int | None], story: Story) -> bool:
    if part.category is not Category.STEP:
        return False
    if part.step is not None:
        return not stood(part.step, floor[part.generation])
    generation = story.generations[part.generation]
    over = story.sessions[generation.session].closed is not None or generation.session < len(story.sessions) - 1
    return not generation.last or generation.broken is not None or over


def _merged(parts: list[Interval]) -> list[Interval]:
    """Join neighbours that differ in nothing."""
    out: list[Interval] = []
    for part in parts:
        last = out[-1] if out else None
        if last is not None and last.end == part.start and _alike(last, part):
            out[-1] = replace(last, end=part.end)
        else:
            out.append(part)
    return out


def _alike(a: Interval, b: Interval) -> bool:
    return (a.category, a.step, a.generation, a.text) == (b.category, b.step, b.generation, b.text)


def _rank_time(lane: Lane) -> RankTime:
    sums: dict[Category | None, int] = {}
    for part in lane.intervals:
        sums[part.category] = sums.get(part.category, 0) + part.end - part.start
    unplaced = sums.pop(None, 0)
    seconds = {c: to_s(sums[c]) for c in Category if sums.get(c)}
    return RankTime(lane.rank, to_s(sum(sums.values()) + unplaced), seconds, to_s(unplaced))


def _holes(story: Story, lanes: list[Lane]) -> list[str]:
    """Every stretch that has no category, as a sentence."""
    start = story.sessions[0].start
    return [
        f"rank {lane.rank}: {to_s(p.end - p.start):.6f} s from {to_s(p.start - start):.6f} s into the run on "
        f"cannot be placed: {p.text}"
        for lane in lanes
        for p in lane.intervals
        if p.category is None
    ]


def _spares(story: Story) -> list[SpareTime]:
    """Processes that stood ready: from their start to the roster that named them, their end, or the session's.

    One that was started for a rank that waited for it never stood ready: its start is that rank's time.
    """
    names = {r.event.name for _, r in story.moments if isinstance(r.event, ProcessStarted)
             and r.event.name.startswith(("spare", "worker"))}  # fmt: skip
    found: list[SpareTime] = []
    for process in story.processes:
        took = _took(story, process)
        if process.name not in names or (took is not None and took[1].why != "spare"):
            continue
        session = next((s for s in reversed(story.sessions) if s.start <= process.started), story.sessions[0])
        ends = [
            session.end,
            *([process.ended] if process.ended is not None else []),
            *([took[0].start] if took else []),
        ]
        end = max(process.started, min(ends))
        seat = (took[1].rank, took[0].index) if took else None
        found.append(SpareTime(process.name, process.pid, process.started, end, seat))
    return found


def _took(story: Story, process: Process) -> tuple[Generation, Seat] | None:
    """The first rank that a process ever held."""
    seats = ((g, seat) for g in story.generations for seat in g.seats.values())
    return next(((g, s) for g, s in seats if s.pid == process.pid and g.start >= process.started), None)


def _losses(lanes: list[Lane], floor: list[int | None]) -> tuple[str, list[Loss]]:
    for lane in lanes:
        names = sorted({name for done in lane.done for name in done.values})
        if names:
            name = "loss" if "loss" in names else names[0]
            return name, [
                Loss(d.at, d.step, d.values[name], d.generation, stood(d.step, floor[d.generation]))
                for d in lane.done
                if name in d.values
            ]
    return "loss", []
