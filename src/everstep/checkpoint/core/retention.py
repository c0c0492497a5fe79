"""Which checkpoints may go: the newest `keep` whole ones stay, and nothing goes before a newer one is durable.

Rule 1: only complete checkpoints count. One that is being written, failed or is damaged keeps nothing alive and
protects nothing (CS-31: a half-written newest one must not push out the only durable one).
Rule 2: the newest complete checkpoint is never removed, whatever `keep` says.
Rule 3: what goes is first made unreadable as a whole (its manifest, then its `.metadata`) and loses its data later, so
that no reader takes half of it for a checkpoint, and one that is reading has time to end (EXPERIMENTS C10).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.errors import UsageError

DEFAULT_KEEP = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """Steps to remove, oldest first, and why."""

    remove: tuple[int, ...]
    reason: str


def check_keep(keep: int | None) -> None:
    """Refuse a number that would leave nothing to restore from."""
    if keep is not None and keep < 1:
        raise UsageError(
            f"keeping {keep} checkpoints would leave nothing to restore from; keep 1 or more, or None to keep all"
        )


def decide(complete: Iterable[int], keep: int | None = DEFAULT_KEEP) -> Decision:
    """Decide which of the `complete` steps go. `keep` None: all stay."""
    check_keep(keep)
    steps = sorted(set(complete))
    if keep is None:
        return Decision((), f"all {len(steps)} are kept, as asked")
    remove = tuple(steps[:-keep])
    if not remove:
        return Decision((), f"{len(steps)} complete, {keep} are kept")
    return Decision(remove, f"the {keep} newest complete ones, from step {steps[-keep]} on, are durable")
