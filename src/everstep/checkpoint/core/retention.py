"""Which checkpoints may go: what nobody asked to keep, and nothing before a newer one is durable.

Rule 1: only complete checkpoints count. One that is being written, failed or is damaged keeps nothing alive and
protects nothing (CS-31: a half-written newest one must not push out the only durable one).
Rule 2: the newest complete checkpoint is never removed, whatever is asked for.
Rule 3: a checkpoint stays as long as one of the three asks for it: the newest `last`, the steps that are multiples of
`every`, the `best` by a metric. One whose metric is not known is not among the best; of equals the newer is better.
Rule 4: what goes is first made unreadable as a whole (its manifest, then its `.metadata`) and loses its data later, so
that no reader takes half of it for a checkpoint, and one that is reading has time to end (EXPERIMENTS C10).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from everstep.errors import UsageError

DEFAULT_KEEP = 2
LESS, MORE = "min", "max"


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays. `last` None: all do."""

    last: int | None = DEFAULT_KEEP  # the newest so many
    every: int | None = None  # those of steps that are multiples of it, for ever
    best: int = 0  # the so many best by `metric`
    metric: str = ""  # a name of what was given with the save
    mode: str = LESS  # min: less is better; max: more is

    def __post_init__(self) -> None:
        """Refuse what would leave nothing to restore from, or cannot be meant."""
        check_keep(self.last)
        if self.every is not None and self.every < 1:
            raise UsageError(f"every {self.every} steps: give 1 or more, or leave it out")
        if self.best < 0 or (self.best > 0) != bool(self.metric):
            raise UsageError(
                f"the best {self.best} by metric {self.metric!r}: name a metric, and how many of the best by it stay"
            )
        if self.mode not in (LESS, MORE):
            raise UsageError(f"mode {self.mode!r}: write {LESS!r} where less is better, {MORE!r} where more is")

    def __str__(self) -> str:
        told = [f"the {self.last} newest"]
        if self.every is not None:
            told.append(f"every {self.every} steps")
        if self.best:
            told.append(f"the {self.best} best by {self.metric} ({self.mode})")
        return " and ".join(told)


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


def keep_of(given: "Keep | int | None") -> Keep:
    """Return what a number or None stands for."""
    return given if isinstance(given, Keep) else Keep(last=given)


def decide(
    complete: Iterable[int],
    keep: Keep | int | None = DEFAULT_KEEP,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
) -> Decision:
    """Decide which of the `complete` steps go. `metrics`: what is known of them, by step."""
    asked = keep_of(keep)
    steps = sorted(set(complete))
    if asked.last is None:
        return Decision((), f"all {len(steps)} are kept, as asked")
    newest = steps[-asked.last :]
    stay = {*newest, *(s for s in steps if asked.every and s % asked.every == 0), *_best(steps, asked, metrics or {})}
    remove = tuple(step for step in steps if step not in stay)
    if not remove:
        return Decision((), f"{len(steps)} complete, {asked} are kept")
    return Decision(remove, f"{asked} are kept: those from step {newest[0]} on are durable")


def _best(steps: Iterable[int], keep: Keep, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
    if not keep.best:
        return []
    sign = 1.0 if keep.mode == LESS else -1.0
    known = {step: metrics[step][keep.metric] for step in steps if keep.metric in metrics.get(step, {})}
    ranked = sorted((sign * value, -step) for step, value in known.items() if isfinite(value))
    return [-step for _, step in ranked[: keep.best]]
