"""The first pass: what each rank says it was doing, as a gap-free list of intervals per rank.

Rule 1: a lane belongs to a rank, whoever holds it. Its spans are one stack; the innermost open span owns the time
(EXPERIMENTS L2). Outside all spans the time belongs to the stage that the rank is in: start-up, regroup, rebuild, step.
Rule 2: what the agent saw closes what a process could not say: a killed process ends at the agent's time, and the gap
until the next holder is filled from the agent's records.
Rule 3: from a fault's instant to its record every rank is in detection, from there to its own arrival (a dead rank: to
the last survivor's) in stop, and from there to the next roster in regroup. These beat whatever spans were open.
Rule 4: what no rule places has no category. It stays in the lane, so that the sum is right and the hole is seen.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from everstep.events import (
    Arrived,
    Category,
    FaultInjected,
    FaultNoticed,
    Restored,
    SpanClosed,
    SpanOpened,
    StepDone,
    StepValues,
    StopBegun,
)
from everstep.goodput.core.axis import to_ns
from everstep.goodput.core.story import Generation, Moment, Process, Seat, Session, Story

LOOP = (Category.STEP, Category.DATA_WAIT, Category.SNAPSHOT, Category.CHECKPOINT_STALL)
SETTLED = (Category.STEP, Category.TAIL)
EARLY = to_ns(1.0)
LATE_VALUES = 4  # how many steps later a step's values may come
NAMES = {c.value: c for c in Category} | {Category.REDO.value: Category.STEP}
"""A step done again is a step: its first execution stands as lost, and one of the two is waste, not both (L1)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of one lane. No category: it cannot be placed, and `text` says why."""

    start: int
    end: int
    category: Category | None
    generation: int = -1  # index in the story; -1: before the first roster of its session
    step: int | None = None  # of STEP: the step it went into; None where that step was never done
    text: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """One execution of a step."""

    at: int
    step: int
    generation: int
    seconds: float
    values: dict[str, float]


@dataclass(slots=True)
class Lane:
    """One rank's time, and the steps it did."""

    rank: int
    intervals: list[Interval] = field(default_factory=list[Interval])
    done: list[Done] = field(default_factory=list[Done])
    holders: list[tuple[int, Seat]] = field(default_factory=list[tuple[int, Seat]])  # when a process took the rank


def overlay(lane: Iterable[Interval], over: Interval) -> list[Interval]:
    """Return `lane` with `over` laid on it."""
    if over.end <= over.start:
        return list(lane)
    out: list[Interval] = []
    for part in lane:
        if part.end <= over.start or part.start >= over.end:
            out.append(part)
            continue
        if part.start < over.start:
            out.append(replace(part, end=over.start))
        if part.end > over.end:
            out.append(replace(part, start=over.end))
    return sorted([*out, over], key=lambda i: i.start)


class _Spans:
    """Reads one holder's records of one generation; the stack of spans, and the stage below it."""

    def __init__(self, generation: Generation, seat: Seat, *, wrapped: bool) -> None:
        kept = seat.why == "kept" and not generation.first
        self.stage = Category.REGROUP if kept else Category.STARTUP if wrapped else Category.SCRIPT
        self.settled = Category.STARTUP if generation.first else Category.REBUILD
        self.generation = generation
        self.at = generation.start
        self.stack: list[tuple[Category | None, str]] = []
        self.restored = False
        self.stopping = False
        self.out: list[Interval] = []
        self.done: list[Done] = []
        self.unknown: list[str] = []

    def move(self, to: int) -> None:
        """Give the time up to `to` to whoever owns it."""
        to = min(max(to, self.at), self.generation.end)
        if to > self.at:
            category, text = self.stack[-1] if self.stack else (self.stage, "")
            self.out.append(Interval(self.at, to, category, self.generation.index, None, text))
            self.at = to

    def hear(self, at: int, record_event: object) -> None:
        """Take one record of the holder."""
        match record_event:
            case SpanOpened(category=name):
                self.move(at)
                self._open(name)
            case SpanClosed(category=name):
                self.move(at)
                self._close(name)
            case StepDone():
                self._step(at, record_event)
            case Restored(seconds=seconds) if not self.restored:
                self._restore(at, to_ns(seconds))
            case _:
                self._hear_aside(at, record_event)

    def _hear_aside(self, at: int, record_event: object) -> None:
        match record_event:
            case StopBegun():
                self.move(at)
                self.stack.clear()  # the spans of an unwound function close late or never
                self.stopping = True
            case StepValues(step=step, values=values):
                for done in self.done[-LATE_VALUES:]:
                    if done.step == step:
                        done.values.update(values)
            case _:
                pass

    def _open(self, name: str) -> None:
        category = NAMES.get(name)
        if category in LOOP:
            self.stage = Category.STEP
        elif category is Category.COMPLETION:
            self.stage = Category.TAIL
        elif self.stage not in SETTLED and not (self.stage is Category.STARTUP and category is Category.STARTUP):
            self.stage = self.settled
        self.restored = self.restored or category is Category.RESTORE
        self.stack.append((category, "" if category else f"a span of the unknown category {name!r}"))

    def _close(self, name: str) -> None:
        category = NAMES.get(name)
        if any(c is category for c, _ in self.stack):
            while self.stack and self.stack.pop()[0] is not category:
                pass
        elif category is not Category.STARTUP and not self.stopping:  # start-up may be opened before the roster came
            self.unknown.append(f"a span {name!r} was closed that was not open")

    def _step(self, at: int, event: StepDone) -> None:
        if self.stage is not Category.STEP:
            self.move(at - to_ns(event.seconds))
            self.stage = Category.STEP
        self.move(at)
        self.done.append(Done(at, event.step, self.generation.index, event.seconds, dict(event.values)))

    def _restore(self, at: int, took: int) -> None:
        self.restored = True
        self.move(at - took)
        self.stack.append((Category.RESTORE, ""))
        self.move(at)
        self.stack.pop()
        if self.stage not in SETTLED:
            self.stage = self.settled


class LaneReader:
    """Builds the lanes of a story."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self._of_pid: dict[int, list[Moment]] = {}
        for at, record in story.moments:
            if record.stamp.role == "worker" and not isinstance(record.event, FaultInjected | FaultNoticed):
                self._of_pid.setdefault(record.stamp.pid, []).append((at, record))

    def read(self) -> list[Lane]:
        """Return one lane for each rank that any roster named, or that the run was started with."""
        lanes: dict[int, Lane] = {}
        for session in self.story.sessions:
            generations = [g for g in self.story.generations if g.session == session.index]
            ranks = set(range(session.opened.world_size)).union(*(g.seats for g in generations))
            for rank in sorted(ranks - (self.story.elsewhere - self._seated())):
                self._session(lanes.setdefault(rank, Lane(rank)), session, generations)
        return [lanes[rank] for rank in sorted(lanes)]

    def _seated(self) -> set[int]:
        """Ranks that somebody held whose records are here."""
        return {rank for generation in self.story.generations for rank in generation.seats}

    def _session(self, lane: Lane, session: Session, generations: list[Generation]) -> None:
        first = generations[0].start if generations else session.end
        if first > session.start:
            lane.intervals.append(Interval(session.start, first, Category.STARTUP))
        for position, generation in enumerate(generations):
            seat = generation.seats.get(lane.rank)
            if seat is None:
                continue  # an elastic world without this rank: its lane has a hole that is not its time
            if not lane.holders or lane.holders[-1][1].pid != seat.pid:
                lane.holders.append((generation.start, seat))
            after = generations[position + 1].seats.get(lane.rank) if not generation.last else None
            lane.intervals.extend(self._segment(lane, session, generation, seat, after))

    def _segment(
        self, lane: Lane, session: Session, generation: Generation, seat: Seat, after: Seat | None
    ) -> list[Interval]:
        process = self.story.process(seat.pid, generation.start)
        spans = _Spans(generation, seat, wrapped=session.opened.wrapped)
        for at, event in self._heard(lane.rank, generation, seat):
            spans.hear(at, event)
        spans.move(generation.end)
        self.story.errors += [f"rank {lane.rank}, generation {generation.number}: {text}" for text in spans.unknown]
        parts = _named_steps(spans.out, spans.done)
        if generation.last and generation.broken is None and session.closed is not None and session.closed.code == 0:
            parts = _tail(parts, spans.done)
        ended = process.ended if process is not None else None
        if ended is not None and ended < generation.end:
            parts = overlay(parts, _after_death(generation, session, process, ended))
            if generation.last and process is not None and _ended_well(session, generation, process):
                over = Interval(self._all_ended(generation), generation.end, Category.TAIL, generation.index)
                parts = overlay(parts, over)
        if generation.broken is not None:
            parts = self._fault(parts, lane.rank, session, generation)
            parts = self._cold_start(parts, generation, seat, after)
        lane.done += spans.done
        return parts

    def _all_ended(self, generation: Generation) -> int:
        """When the last holder had ended; the generation's end where one had not."""
        found = [self.story.process(seat.pid, generation.start) for seat in generation.seats.values()]
        return max(generation.end if p is None or p.ended is None else p.ended for p in found)

    def _heard(self, rank: int, generation: Generation, seat: Seat) -> list[tuple[int, object]]:
        """The holder's records of this generation.

        By time; but a record stamped with a generation that begins within the next second is that one's already: the
        worker may be told its roster a moment before the agent writes it down.
        """
        moments = self._of_pid.get(seat.pid, [])
        index = generation.index
        following = None if generation.last else self.story.generations[index + 1]
        found: list[tuple[int, object]] = []
        start = bisect_left(moments, generation.start - EARLY, key=lambda m: m[0])
        for at, record in moments[start : bisect_right(moments, generation.end, key=lambda m: m[0])]:
            stamped = record.stamp.generation
            if at < generation.start:
                mine = stamped == generation.number and not generation.first
            else:
                mine = following is None or following.number != stamped or following.start - at >= EARLY
            if mine and record.stamp.rank in (None, rank) and at >= self.story.sessions[generation.session].start:
                found.append((at, record.event))
        return found

    # -------------------------------------------------------------------------------------------- faults

    def _fault(self, parts: list[Interval], rank: int, session: Session, generation: Generation) -> list[Interval]:
        broken = generation.broken
        assert broken is not None
        arrived = self.arrivals(generation)
        all_stopped = max([broken.noticed, *(at for at in arrived.values() if at is not None)])
        stopped = arrived.get(rank)
        if stopped is None:  # dead, or not unwound yet
            stopped = all_stopped if not generation.last or session.closed else generation.end
        stopped = max(stopped, broken.noticed)
        index = generation.index
        after = Category.TAIL if generation.last and session.closed is not None else Category.REGROUP
        parts = overlay(parts, Interval(stopped, generation.end, after, index))
        parts = overlay(parts, Interval(broken.noticed, stopped, Category.STOP, index))
        return overlay(parts, Interval(broken.instant, broken.noticed, Category.DETECTION, index))

    def arrivals(self, generation: Generation) -> dict[int, int | None]:
        """When each rank stood ready after the fault of `generation`; None for one that never did."""
        return {rank: self._arrival(generation, seat) for rank, seat in generation.seats.items()}

    def _arrival(self, generation: Generation, seat: Seat) -> int | None:
        moments = self._of_pid.get(seat.pid, [])
        start = bisect_left(moments, generation.start, key=lambda m: m[0])
        end = bisect_right(moments, generation.end, key=lambda m: m[0])
        for at, record in moments[start:end]:
            event = record.event
            mine = isinstance(event, Arrived) and event.number > generation.number
            if mine and record.stamp.rank in (None, seat.rank):
                return at
        process = self.story.process(seat.pid, generation.end)
        ended = process.ended if process is not None else None
        broken = generation.broken
        if ended is None or broken is None or not broken.noticed < ended <= generation.end:
            return None
        return ended  # it was ended after the fault was known: its stop is its death

    def _cold_start(
        self, parts: list[Interval], generation: Generation, seat: Seat, after: Seat | None
    ) -> list[Interval]:
        """A holder that had to be started within the gap was in start-up from its first moment."""
        if after is None or after.pid == seat.pid or after.why != "started":
            return parts
        process = self.story.process(after.pid, generation.end)
        if process is None or process.started <= generation.start:
            return parts
        return overlay(parts, Interval(process.started, generation.end, Category.STARTUP, generation.index))


def _named_steps(parts: list[Interval], done: list[Done]) -> list[Interval]:
    """Give every STEP interval the step that it went into."""
    ends = [d.at for d in done]
    out: list[Interval] = []
    for part in parts:
        position = bisect_left(ends, part.end)
        named = part.category is Category.STEP and position < len(done)
        out.append(replace(part, step=done[position].step) if named else part)
    return out


def _tail(parts: list[Interval], done: list[Done]) -> list[Interval]:
    """The run ended well: what follows the last step and belongs to none is the way out."""
    last = done[-1].at if done else None
    return [
        replace(p, category=Category.TAIL)
        if last is not None and p.start >= last and p.category is Category.STEP and p.step is None
        else p
        for p in parts
    ]


def _after_death(generation: Generation, session: Session, process: Process | None, ended: int) -> Interval:
    """The time after a holder's end, before any fault is laid on it."""
    assert process is not None
    start = max(ended, generation.start)
    if _ended_well(session, generation, process):
        return Interval(start, generation.end, Category.COMPLETION, generation.index)
    over = generation.last and session.closed is not None and (process.expected or session.closed.code != 0)
    if over:
        return Interval(start, generation.end, Category.TAIL, generation.index)
    if generation.last and session.closed is None:  # it will be noticed in a moment
        return Interval(start, generation.end, Category.DETECTION, generation.index)
    text = f"process {process.pid} ended with status {process.status} and no fault was recorded"
    return Interval(start, generation.end, None, generation.index, None, text)


def _ended_well(session: Session, generation: Generation, process: Process) -> bool:
    """A script without a wrapped call says by its exit code 0 that this rank is done, whenever the others are."""
    well = generation.last and session.closed is not None and session.closed.code == 0
    return process.status == 0 and not process.expected and (well or not session.opened.wrapped)
