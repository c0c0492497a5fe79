"""One save, from its intent to its commit: who has done what, and what is to be done next.

Rule 1: a save is known by its token (step, lineage, job, attempt). What carries another token is not for it, however
late it comes: a dead attempt's report never counts for its successor (CS-39).
Rule 2: writing begins when every rank has staged, so a void intent has written nothing.
Rule 3: completeness is what the writers have reported, never what a directory shows (EXPERIMENTS C3).
Rule 4: merging is asked of one writer, and of another if that one is lost: it is a pure function, and publishing is
one rename, so twice does no harm (C5).
Rule 5: a death of a worker ends a save that it has not staged yet, and no other: writers read what the agent holds
(C9). A death of a writer ends the save that it was writing.
Rule 6: every end has a sentence. Void is not a failure: nothing was lost that was promised.

The table is the protocol; `hear` is total: what a phase does not expect leaves the save as it is.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


class Phase(enum.Enum):
    """How far a save is."""

    ASKED = "asked"  # the ranks have been told
    WRITING = "writing"  # all ranks have staged; the writers write
    MERGING = "merging"  # all fragments are in; one writer publishes
    COMMITTED = "committed"
    VOID = "void"  # given up before anything was written
    FAILED = "failed"


MERGE_LIMIT = 3
"""Mergers that may be lost in one save; what kills so many would kill the next."""

ENDS = frozenset({Phase.COMMITTED, Phase.VOID, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class Save:
    """One save."""

    token: str
    step: int
    world_size: int
    phase: Phase = Phase.ASKED
    staged: frozenset[int] = frozenset()
    written: Mapping[int, int] = field(default_factory=dict[int, int])  # rank → bytes
    merger: int = 0
    mergers: tuple[int, ...] = ()  # whose writers may merge, where that is not every rank's (of other nodes)
    merges: int = 1  # how often a merge was or will be asked for
    text: str = ""  # why it ended as it did

    @property
    def ended(self) -> bool:
        """True when nothing more comes of it."""
        return self.phase in ENDS


# What a save hears.


@dataclass(frozen=True, slots=True)
class Staged:
    """This rank holds the step in a buffer that it will not touch."""

    rank: int


@dataclass(frozen=True, slots=True)
class Late:
    """This rank was past the step when it was told."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Written:
    """This rank's shard and its fragment are durable."""

    rank: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Published:
    """The whole checkpoint has its name."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A writer could not do what it was asked."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class WriterLost:
    """The writer of this rank is gone."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The generation of the intent has ended."""

    text: str


Event = Staged | Late | Written | Published | Refused | WriterLost | Stopped

# What is to be done.


@dataclass(frozen=True, slots=True)
class Write:
    """Have this rank's writer write what the rank has staged."""

    rank: int


@dataclass(frozen=True, slots=True)
class Release:
    """This rank's buffer is free again."""

    rank: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Have this rank's writer merge all fragments and publish."""

    rank: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell the ranks that have not staged that the intent is void."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what was written of this save."""


Command = Write | Release | Merge | Withdraw | Discard
Outcome = tuple[Save, tuple[Command, ...]]


def hear(save: Save, event: Event) -> Outcome:
    """Take one event; return the save as it now is, and what follows. Repeats and late comers change nothing."""
    handler = TABLE.get((save.phase, type(event)))
    return (save, ()) if handler is None else handler(save, event)


def _staged(save: Save, event: Event) -> Outcome:
    assert isinstance(event, Staged)
    if not 0 <= event.rank < save.world_size:
        return save, ()
    staged = save.staged | {event.rank}
    if len(staged) < save.world_size:
        return replace(save, staged=staged), ()
    return replace(save, staged=staged, phase=Phase.WRITING), tuple(Write(rank) for rank in range(save.world_size))


def _void(save: Save, event: Event) -> Outcome:
    assert isinstance(event, Late | Stopped)
    text = event.text if isinstance(event, Stopped) else f"rank {event.rank} was already at step {event.step}"
    ended = replace(save, phase=Phase.VOID, text=text)
    return ended, (Withdraw(), *(Release(rank) for rank in sorted(save.staged)))


def _written(save: Save, event: Event) -> Outcome:
    assert isinstance(event, Written)
    if event.rank in save.written or not 0 <= event.rank < save.world_size:
        return save, ()
    written = {**save.written, event.rank: event.bytes}
    if len(written) < save.world_size:
        return replace(save, written=written), (Release(event.rank),)
    return replace(save, written=written, phase=Phase.MERGING), (Release(event.rank), Merge(save.merger))


def _failed(save: Save, event: Event) -> Outcome:
    assert isinstance(event, Refused | WriterLost)
    held = tuple(Release(rank) for rank in sorted(save.staged - set(save.written)))
    return replace(save, phase=Phase.FAILED, text=f"rank {event.rank}: {event.text}"), (*held, Discard())


def _writer_lost(save: Save, event: Event) -> Outcome:
    """A writer that has reported is needed no more; one that has not takes the save with it."""
    assert isinstance(event, WriterLost)
    return (save, ()) if event.rank in save.written else _failed(save, event)


def _merger_lost(save: Save, event: Event) -> Outcome:
    assert isinstance(event, WriterLost)
    if event.rank != save.merger:
        return save, ()
    if save.merges >= MERGE_LIMIT:
        return _failed(save, event)
    able = save.mergers or tuple(range(save.world_size))
    again = able[(able.index(save.merger) + 1) % len(able)]
    return replace(save, merger=again, merges=save.merges + 1), (Merge(again),)


def _published(save: Save, event: Event) -> Outcome:
    return replace(save, phase=Phase.COMMITTED), ()


TABLE: Mapping[tuple[Phase, type], Callable[[Save, Event], Outcome]] = {
    (Phase.ASKED, Staged): _staged,
    (Phase.ASKED, Late): _void,
    (Phase.ASKED, Stopped): _void,
    (Phase.WRITING, Written): _written,
    (Phase.WRITING, Refused): _failed,
    (Phase.WRITING, WriterLost): _writer_lost,
    (Phase.MERGING, Published): _published,
    (Phase.MERGING, Refused): _failed,
    (Phase.MERGING, WriterLost): _merger_lost,
}
"""Every other pair changes nothing."""
