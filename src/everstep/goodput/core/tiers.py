"""What became of the saves of each tier, how often it really saved, and how old its newest state was.

* taken: saves that every rank held a snapshot for. committed: those that are whole in the tier; in memory, those that
  every rank has. failed, coalesced: told by their own events. skipped: intents that no rank had to keep.
* bytes, seconds: of what was committed, over all ranks; from the last snapshot to the commit. In memory: the copy, of
  the slowest rank, while the loop stood.
* achieved interval: the mean distance of two committed saves, in steps and in time; what was meant does not count.
* age: from the moment at which the state was taken to the end of the records, or to the next commit. `oldest_s` is the
  worst that it came to while the job ran: what would have been lost with everything else.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.events import StepDone, TierEvent
from everstep.goodput.core.axis import to_s
from everstep.goodput.core.story import Session, Story

MEMORY = "memory"
ORDER = (MEMORY, "peer", "local", "disk")


@dataclass(frozen=True, slots=True)
class Saved:
    """One save of one tier. Moments are nanoseconds on the common axis."""

    step: int
    taken: int
    ended: int
    what: str  # committed | failed
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tier:
    """What one tier saved, and how often it really did."""

    name: str
    taken: int
    coalesced: int
    committed: int
    failed: int
    bytes: int
    seconds: float
    interval_steps: float | None
    interval_s: float | None
    newest_step: int | None
    age_s: float | None  # of the newest, at the end of the records
    oldest_s: float | None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])  # of every kind of event
    saves: tuple[Saved, ...] = ()
    left_out: tuple[int, ...] = ()  # when steps were coalesced

    @property
    def save_s(self) -> float | None:
        """The median of one save."""
        took = [save.seconds for save in self.saves if save.what == "committed" and save.seconds]
        return median(took) if took else None


def read_tiers(story: Story) -> list[Tier]:
    """Return each tier that saved or failed, the nearest first."""
    events: dict[str, list[tuple[int, TierEvent]]] = {}
    for at, record in story.moments:
        if isinstance(record.event, TierEvent):
            events.setdefault(record.event.tier, []).append((at, record.event))
    in_memory = _snapshots(story)
    copied: dict[int, list[int]] = {}  # when the state of a step was copied to memory, by the step
    for at, step in _copies(in_memory, events.get(MEMORY, [])):
        copied.setdefault(step, []).append(at)
    names = sorted(events.keys() | ({MEMORY} if in_memory else set[str]()), key=_near)
    return [
        _tier(name, events.get(name, []), in_memory if name == MEMORY else [], story.sessions, copied) for name in names
    ]


def _copies(in_memory: Iterable[Saved], told: Iterable[tuple[int, TierEvent]]) -> Iterator[tuple[int, int]]:
    yield from ((save.taken, save.step) for save in in_memory)
    yield from ((at, event.step) for at, event in told if event.what == "taken")


def _near(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def _snapshots(story: Story) -> list[Saved]:
    """The memory tier, as the ranks tell of it with each step: one save for each step that a generation did."""
    sizes = {(g.session, g.number): len(g.seats) for g in story.generations}
    told: dict[tuple[int, int, int], dict[int, tuple[int, StepDone]]] = {}
    for at, record in story.moments:
        event, stamp = record.event, record.stamp
        if isinstance(event, StepDone) and event.snapshot_bytes and stamp.rank is not None:
            session = _session(story.sessions, at)
            told.setdefault((session, stamp.generation or 0, event.step), {})[stamp.rank] = at, event
    saves: list[Saved] = []
    for (session, generation, step), ranks in told.items():
        whole = len(ranks) >= sizes.get((session, generation), len(ranks))
        slowest = max(event.snapshot_s for _, event in ranks.values())
        size = sum(event.snapshot_bytes for _, event in ranks.values())
        first, last = min(at for at, _ in ranks.values()), max(at for at, _ in ranks.values())
        saves.append(Saved(step, first, last, "committed" if whole else "taken", size, slowest))
    return sorted(saves, key=lambda save: save.ended)


def _session(sessions: Sequence[Session], at: int) -> int:
    return next((s.index for s in reversed(sessions) if s.start <= at), 0)


def _tier(
    name: str,
    found: list[tuple[int, TierEvent]],
    in_memory: list[Saved],
    sessions: Sequence[Session],
    copied: Mapping[int, list[int]],
) -> Tier:
    counts: dict[str, int] = {}
    for _, event in found:
        counts[event.what] = counts.get(event.what, 0) + 1
    final = "taken" if name == MEMORY else "committed"
    saves = sorted([*in_memory, *_saves(found, final, copied)], key=lambda save: save.ended)
    for save in in_memory:
        counts["taken"] = counts.get("taken", 0) + 1
        if save.what == "committed":
            counts["committed"] = counts.get("committed", 0) + 1
    whole = [save for save in saves if save.what == "committed"]
    kept = {save.step: save for save in whole}  # the last of each: rollbacks repeat steps
    times = sorted(save.ended for save in kept.values())
    gaps = len(times) - 1
    newest = kept[max(kept)] if kept else None
    return Tier(
        name=name,
        taken=max(counts.get("taken", 0), len(whole)),
        coalesced=counts.get("coalesced", 0),
        committed=len(whole),
        failed=counts.get("failed", 0),
        bytes=sum(save.bytes for save in whole),
        seconds=sum(save.seconds for save in whole),
        interval_steps=(max(kept) - min(kept)) / gaps if gaps > 0 else None,
        interval_s=to_s(times[-1] - times[0]) / gaps if gaps > 0 else None,
        newest_step=max(kept, default=None),
        age_s=to_s(sessions[-1].end - newest.taken) if newest else None,
        oldest_s=_oldest(whole, sessions),
        counts=counts,
        saves=tuple(saves),
        left_out=tuple(at for at, event in found if event.what == "coalesced"),
    )


def _saves(found: Iterable[tuple[int, TierEvent]], final: str, copied: Mapping[int, list[int]]) -> list[Saved]:
    """Each end of a save, with the moment at which its state was taken: it may have waited in memory to be written."""
    taken: dict[int, int] = {}
    saves: list[Saved] = []
    for at, event in found:
        if event.what == "taken":
            taken[event.step] = at
        if event.what in (final, "failed"):
            began = taken.pop(event.step, at - round(event.seconds * 1e9))
            began = max((t for t in copied.get(event.step, ()) if t <= began), default=began)
            what = "failed" if event.what == "failed" else "committed"
            saves.append(Saved(event.step, began, at, what, event.bytes, event.seconds))
    return saves


def _oldest(whole: Sequence[Saved], sessions: Sequence[Session]) -> float | None:
    """The greatest age that the newest state came to, within a session; before the first one there is none to age."""
    ages: list[int] = []
    for session in sessions:
        inside = [save for save in whole if session.start <= save.ended <= session.end]
        ends = [*(save.ended for save in inside[1:]), session.end]
        ages += [end - save.taken for save, end in zip(inside, ends, strict=True)] if inside else []
    return to_s(max(ages)) if ages else None
