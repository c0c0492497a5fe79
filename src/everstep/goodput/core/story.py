"""What happened, read from the records once: sessions, generations, who held which rank, what broke each generation.

Rule 1: one session is one life of the agents: from RunStarted to the last RunEnded, else to the last record. Time
between two sessions belongs to no rank: no process of the run existed.
Rule 2: whoever a GenerationStarted names holds the rank until the next one. Worker records are told apart by process,
then by the generation in their stamp, and only where that is missing by time.
Rule 3: the first record of a fault gives the time, a death recorded later names the cause (events.FaultNoticed).
Rule 4: a fault's instant is our injector's record where there is one, else the injured rank's last mark, else the
record of the fault; never later than the end of a member that died of it.
Not known here: what a second was spent on (lanes), and which steps stood (accounting).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from everstep.errors import LedgerError
from everstep.events import (
    FaultInjected,
    FaultNoticed,
    GenerationStarted,
    ProcessEnded,
    ProcessStarted,
    Record,
    Restored,
    RunEnded,
    RunStarted,
)
from everstep.goodput.core.axis import Axis, to_ns

Moment = tuple[int, Record]
PIDS = 1 << 32
"""Processes of other nodes have larger numbers (goodput/log.py)."""
NAMES_THE_CAUSE = ("death", "wedged", "stall")


@dataclass(frozen=True, slots=True)
class Process:
    """One process as its agent saw it."""

    name: str
    pid: int
    started: int
    ended: int | None = None
    status: int | None = None
    expected: bool = True


@dataclass(frozen=True, slots=True)
class Seat:
    """Who holds a rank in one generation, and why."""

    rank: int
    slot: int
    pid: int
    why: str


@dataclass(frozen=True, slots=True)
class Break:
    """What ended a generation: its fault or faults, seen as one."""

    instant: int
    noticed: int
    records: tuple[FaultNoticed, ...]
    injected: tuple[tuple[int, FaultInjected], ...] = ()

    @property
    def first(self) -> FaultNoticed:
        """The record that opened the fault."""
        return self.records[0]

    @property
    def cause(self) -> FaultNoticed:
        """The record that names the cause best."""
        return next((r for r in self.records if r.kind in NAMES_THE_CAUSE), self.first)


@dataclass(frozen=True, slots=True)
class Generation:
    """One attempt, from its roster to the next roster or to the end of its session."""

    index: int  # over the whole story; `number` begins again with each epoch
    session: int
    number: int
    start: int
    end: int
    seats: dict[int, Seat]
    restore_step: int  # 0: from the beginning
    restored_from: str | None
    first: bool  # of its session
    last: bool  # of its session
    broken: Break | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One life of the agents."""

    index: int
    start: int
    end: int
    opened: RunStarted
    closed: RunEnded | None
    wall_s: float  # of its first record, for people


@dataclass(slots=True)
class Story:
    """The facts of a run."""

    axis: Axis
    moments: list[Moment]
    sessions: list[Session] = field(default_factory=list[Session])
    generations: list[Generation] = field(default_factory=list[Generation])
    processes: list[Process] = field(default_factory=list[Process])
    errors: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    elsewhere: set[int] = field(default_factory=set[int])  # ranks that stood on a node whose records are not here

    def process(self, pid: int, at: int) -> Process | None:
        """Return the process that had `pid` at `at`, the latest to start where several had."""
        return next((p for p in reversed(self.processes) if p.pid == pid and p.started <= at), None)


def read_story(records: Sequence[Record], until: int | None = None) -> Story:
    """Order the records and find what happened. `until`: now, for a run that is still going.

    Raises LedgerError where no agent said that a run began: nothing can be accounted for without it.
    """
    axis = Axis.of(records)
    moments = sorted(((axis.place(r.stamp), r) for r in records), key=lambda m: m[0])
    story = Story(axis, moments)
    _sessions(story, until)
    _processes(story)
    for session in story.sessions:
        _generations(story, session)
    if story.elsewhere:
        ranks = ", ".join(map(str, sorted(story.elsewhere)))
        story.notes.append(
            f"what rank {ranks} did on other nodes is not in this folder and counts for nothing here; copy the run "
            "folders of those nodes into it, as node-1 and so on"
        )
    return story


# ------------------------------------------------------------------------------------------------ sessions


def _sessions(story: Story, until: int | None) -> None:
    starts = _first_records_of_lives(story)
    if not starts:
        raise LedgerError(
            "no RunStarted among the records: the agent's own log is missing or was torn before its first line. "
            "Expected events/*.jsonl of `everstep run` with the agent's file among them."
        )
    if any(isinstance(r.event, RunEnded) and at < starts[0][0] for at, r in story.moments):
        story.errors.append("a RunEnded stands before the first RunStarted; it was left out")
    bounds = [at for at, _ in starts[1:]]
    for index, (at, record) in enumerate(starts):
        inside = [m for m in story.moments if m[0] >= at and (index == len(bounds) or m[0] < bounds[index])]
        limit = until if index == len(bounds) else None
        story.sessions.append(_session(index, at, record, inside, limit))
    jobs = sorted({s.opened.job for s in story.sessions})
    if len(jobs) > 1:
        story.notes.append(f"this folder holds records of {len(jobs)} jobs: {', '.join(jobs)}; they are told as one")


def _first_records_of_lives(story: Story) -> list[Moment]:
    """A RunStarted begins a session unless another node's agent is still in the one before.

    Where other nodes' folders lie in the first one's (goodput/log.py), the first node's agent alone begins them.
    """
    starts: list[Moment] = []
    living: dict[str, int] = {}
    words: dict[tuple[str, int], int] = {}  # an agent's first: it owns the zygote before it has read all flags
    for at, record in story.moments:
        boot, pid = record.stamp.boot_id, record.stamp.pid
        if pid >= PIDS:
            continue
        if isinstance(record.event, ProcessStarted) and living.get(boot) != pid:
            words.setdefault((boot, pid), at)
        elif isinstance(record.event, RunStarted):
            if not living or boot in living:
                starts.append((words.pop((boot, pid), at), record))
                living = {}
            living[boot] = pid
        elif isinstance(record.event, RunEnded):
            living.pop(boot, None)
    return starts


def _session(index: int, start: int, record: Record, inside: list[Moment], until: int | None) -> Session:
    assert isinstance(record.event, RunStarted)
    told = [(at, r) for at, r in inside if isinstance(r.event, RunEnded)]
    firsts = [(at, r) for at, r in told if r.stamp.pid < PIDS]
    ends = [(at, r.event) for at, r in firsts or told if isinstance(r.event, RunEnded)]
    goes_on = max((at for at, r in inside if isinstance(r.event, GenerationStarted | FaultNoticed)), default=start)
    if ends and ends[-1][0] >= goes_on:  # an end written at each restart is none
        at, closed = ends[-1]
        return Session(index, start, at, record.event, closed, record.stamp.wall_s)
    end = max([at for at, _ in inside] + ([until] if until is not None else []))
    return Session(index, start, end, record.event, None, record.stamp.wall_s)


def _processes(story: Story) -> None:
    for at, record in story.moments:
        event = record.event
        if isinstance(event, ProcessStarted):
            story.processes.append(Process(event.name, event.child_pid, at))
        elif isinstance(event, ProcessEnded):
            known = story.process(event.child_pid, at)
            if known is not None and known.ended is None:
                where = story.processes.index(known)
                story.processes[where] = Process(
                    known.name, known.pid, known.started, at, event.status, event.expected
                )  # fmt: skip


# ------------------------------------------------------------------------------------------------ generations


def _generations(story: Story, session: Session) -> None:
    begun = _agreed(story, session, _rosters(story, session))
    breaks = _breaks(story, session, begun)
    here = {event.node for _, event in _rosters_of_all(story)}
    for position, (at, event) in enumerate(begun):
        last = position == len(begun) - 1
        away = {m[0] for m, node in zip(event.members, event.nodes, strict=False) if node not in here}
        story.elsewhere |= away
        story.generations.append(
            Generation(
                index=len(story.generations),
                session=session.index,
                number=event.number,
                start=at,
                end=session.end if last else begun[position + 1][0],
                seats={rank: Seat(rank, slot, pid, why) for rank, slot, pid, why in event.members if rank not in away},
                restore_step=event.restore_step or 0,
                restored_from=event.restored_from,
                first=position == 0,
                last=last,
                broken=breaks.get(position),
            )
        )
        if not last and position not in breaks:
            story.errors.append(f"generation {event.number} was followed by another, but nothing says why it ended")


def _rosters_of_all(story: Story) -> list[tuple[int, GenerationStarted]]:
    return [(at, r.event) for at, r in story.moments if isinstance(r.event, GenerationStarted)]


def _within(story: Story, session: Session) -> list[Moment]:
    return [m for m in story.moments if session.start <= m[0] <= session.end]


def _rosters(story: Story, session: Session) -> list[tuple[int, GenerationStarted]]:
    """Every agent records a roster; the first record of each counts."""
    seen: set[tuple[int, int]] = set()
    found: list[tuple[int, GenerationStarted]] = []
    for at, record in _within(story, session):
        event = record.event
        if isinstance(event, GenerationStarted) and (event.epoch, event.number) not in seen:
            seen.add((event.epoch, event.number))
            found.append((at, event))
    return found


def _agreed(
    story: Story, session: Session, begun: list[tuple[int, GenerationStarted]]
) -> list[tuple[int, GenerationStarted]]:
    """Where nodes agreed after the roster, its ranks say what they restored; one that ended first lost nothing itself.

    What such a one would have begun from is then taken to be what the next began from.
    """
    if all(event.decided for _, event in begun):
        return begun
    said = {r.stamp.generation: r.event for _, r in _within(story, session) if isinstance(r.event, Restored)}
    found: list[tuple[int, GenerationStarted]] = []
    for at, event in reversed(begun):
        later = found[-1][1] if found else None
        restored = said.get(event.number)
        if event.decided:
            found.append((at, event))
        elif restored is not None:
            found.append((at, replace(event, restore_step=restored.step, restored_from=restored.tier)))
        elif later is not None:
            found.append((at, replace(event, restore_step=later.restore_step, restored_from=later.restored_from)))
        else:
            found.append((at, event))
    return found[::-1]


def _breaks(story: Story, session: Session, begun: list[tuple[int, GenerationStarted]]) -> dict[int, Break]:
    starts = [at for at, _ in begun]
    noticed: dict[int, list[tuple[int, Record, FaultNoticed]]] = {}
    injected: dict[int, list[tuple[int, FaultInjected]]] = {}
    for at, record in _within(story, session):
        event = record.event
        if isinstance(event, FaultNoticed):
            noticed.setdefault(_broken_by(event, at, begun), []).append((at, record, event))
        elif isinstance(event, FaultInjected):
            injected.setdefault(max(0, bisect_right(starts, at) - 1), []).append((at, event))
    ends = [*starts[1:], session.end]
    for position, harm in injected.items():
        if position not in noticed and position < len(ends):
            named = ", ".join(f"{e.type} at step {e.step} on rank {e.injured_rank}" for _, e in harm)
            story.notes.append(f"injected, but no fault was recorded (yet): {named}")
    return {
        position: _break(
            story,
            found,
            injected.get(position, []),
            (begun[position][1], starts[position], ends[position]),
            wrapped=session.opened.wrapped,
        )
        for position, found in noticed.items()
        if position < len(starts)
    }


def _broken_by(event: FaultNoticed, at: int, begun: list[tuple[int, GenerationStarted]]) -> int:
    """The latest roster of that number that stood when the fault was recorded; else the one that stood."""
    standing = [i for i, (start, _) in enumerate(begun) if start <= at]
    named = [i for i in standing if begun[i][1].number == event.number]
    return (named or standing or [0])[-1]


def _break(
    story: Story,
    found: list[tuple[int, Record, FaultNoticed]],
    injected: list[tuple[int, FaultInjected]],
    roster: tuple[GenerationStarted, int, int],
    *,
    wrapped: bool,
) -> Break:
    members, start, end = roster
    noticed = min(max(found[0][0], start), end)
    before = [t for t, _ in injected if t <= noticed]
    marks = [to_ns(e.last_mark_s) + story.axis.offsets[r.stamp.boot_id] for _, r, e in found if e.last_mark_s]
    instant = min(before) if before else (marks[0] if marks else noticed)
    pids = {pid for _, _, pid, _ in members.members}
    gone = [p for p in story.processes if p.pid in pids and not p.expected and (wrapped or p.status != 0)]
    deaths = [p.ended for p in gone if p.ended is not None]
    instant = min(
        [instant, *(at for at in deaths if start <= at <= noticed)]
    )  # a dead rank's time is detection at least
    return Break(
        instant=max(instant, start),
        noticed=noticed,
        records=tuple(e for _, _, e in found),
        injected=tuple(injected),
    )
