"""What of a saved state fits the live objects, and what does not: the words of a partial restore."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.checkpoint.core.layout import Section

Undo = Callable[[], None]
"""Takes back what an attempt has set."""


def taken_back(undo: Undo, error: BaseException) -> None:
    """Undo in the course of `error`, which must be what is heard of: who refuses its former state is noted there."""
    try:
        undo()
    except Exception as second:  # noqa: BLE001 - a user's object may raise anything
        error.add_note(f"and its former state could not be set again: {type(second).__name__}: {second}")


SHOWN = 12  # names in one message


@dataclass(frozen=True, slots=True)
class Fitting:
    """What one object would take."""

    taken: dict[str, Section] = field(default_factory=dict[str, Section])
    missing: list[str] = field(default_factory=list[str])  # is here, and was not saved: stays as it is
    left_over: list[str] = field(default_factory=list[str])  # was saved, and nothing here takes it
    differing: list[str] = field(default_factory=list[str])  # is there and here and does not fit, with the reason


@dataclass(frozen=True, slots=True)
class Partial:
    """What a restore with `strict=False` did."""

    bytes: int
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """True where nothing was left out: it was as good as a strict restore."""
        return not (self.missing or self.left_over or self.differing)

    def __str__(self) -> str:
        parts = (
            ("not in the saved state, left as it was", self.missing),
            ("saved, and taken by nothing here", self.left_over),
            ("did not fit, left as it was", self.differing),
        )
        return "; ".join(f"{what}: {shown(names)}" for what, names in parts if names) or "all of it was taken"


def shown(names: tuple[str, ...] | list[str], separator: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = f"{separator}and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return separator.join(names[:SHOWN]) + more


def merged(fittings: Mapping[str, Fitting] | list[Fitting]) -> Fitting:
    """Put what several objects would take together."""
    made = Fitting()
    for one in fittings.values() if isinstance(fittings, Mapping) else fittings:
        made.taken.update(one.taken)
        made.missing.extend(one.missing)
        made.left_over.extend(one.left_over)
        made.differing.extend(one.differing)
    return made


def other_class(section: Section, kind: str) -> list[str]:
    """Say where an object of another class saved it than `kind`, which would go on with it as its own; else nothing."""
    told = f"{section.name} was saved by an object of the class {section.kind}, and this one is {kind}"
    return [told] if section.kind and kind and section.kind != kind else []
