"""One save of the peer tier, from its intent to the point at which it counts: who has done what.

Rule 1: a save is known by its token; what carries another is not for it, however late it comes.
Rule 2: copies are sent when every rank has staged: a void intent has sent nothing.
Rule 3: a save counts when every copy that was wanted has been received and verified by its keeper; until then the one
before it stays where it is, with every keeper.
Rule 4: every end has a sentence. Void is not a failure: nothing was lost that was promised.

Copies are memory, and go with it: no end of one shows in a job's exit status.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


class Phase(enum.Enum):
    """How far a save is."""

    ASKED = "asked"  # the ranks have been told
    SENDING = "sending"  # all have staged; their nodes send
    COMMITTED = "committed"
    VOID = "void"  # given up before anything was sent
    FAILED = "failed"


ENDS = frozenset({Phase.COMMITTED, Phase.VOID, Phase.FAILED})
Wanted = frozenset[tuple[int, str]]
"""Pairs of a rank and a node that is to keep its snapshot."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save."""

    token: str
    step: int
    ranks: frozenset[int]
    wanted: Wanted
    phase: Phase = Phase.ASKED
    staged: frozenset[int] = frozenset()
    kept: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])  # bytes of each copy
    text: str = ""

    @property
    def ended(self) -> bool:
        """True when nothing more comes of it."""
        return self.phase in ENDS

    @property
    def bytes(self) -> int:
        """What has been received."""
        return sum(self.kept.values())


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
class Kept:
    """A node has received and verified a rank's copy."""

    rank: int
    node: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A copy could not be sent or received."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The generation of the intent, or a node, has gone."""

    text: str


Event = Staged | Late | Kept | Refused | Stopped


def hear(save: Save, event: Event) -> Save:
    """Return the save after an event. Total: what a phase does not expect leaves the save as it is."""
    if save.ended:
        return save
    match event:
        case Staged(rank) if save.phase is Phase.ASKED and rank in save.ranks:
            staged = save.staged | {rank}
            return replace(save, staged=staged, phase=Phase.SENDING if staged == save.ranks else Phase.ASKED)
        case Late(rank, step) if save.phase is Phase.ASKED:
            return _ended(save, f"rank {rank} was at step {step} when the intent for step {save.step} came")
        case Kept(rank, node, size) if save.phase is Phase.SENDING and (rank, node) in save.wanted:
            kept = {**save.kept, (rank, node): size}
            return replace(save, kept=kept, phase=Phase.COMMITTED if kept.keys() >= save.wanted else Phase.SENDING)
        case Refused(rank, text):
            return _ended(save, f"the copy of rank {rank}: {text}")
        case Stopped(text):
            return _ended(save, text)
        case _:
            return save


def _ended(save: Save, text: str) -> Save:
    return replace(save, phase=Phase.VOID if save.phase is Phase.ASKED else Phase.FAILED, text=text)
