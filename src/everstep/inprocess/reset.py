"""A survivor equals a fresh spare: record process-global state at the first entry, restore it after each unwinding.

Whatever still differs is named in the roster's facts, and such a rank is replaced (EXPERIMENTS P9, I2).

Rule 1: restoring is tried for each piece apart; one that fails is found by the fingerprint, not by an exception.
Rule 2: the fingerprint reads again; it does not trust what was written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from everstep.inprocess import groups, items
from everstep.inprocess.items import UNKNOWN, Absent, Item


@dataclass(frozen=True, slots=True)
class Baseline:
    """Process-global state as the wrapped function found it at its first call."""

    values: Mapping[str, Any]
    missing: tuple[str, ...]
    """What is not looked at, since this version of torch (or this machine) has not got it."""


def record() -> Baseline:
    """Read everything. Main thread, before the function is called for the first time."""
    values: dict[str, Any] = {}
    missing: list[str] = []
    for item in _table():
        try:
            values[item.name] = item.fresh if item.always else _read(item)
        except Absent:
            if item.fresh is UNKNOWN:
                missing.append(item.name)
            else:
                values[item.name] = item.fresh
    return Baseline(values, tuple(missing))


def restore(baseline: Baseline) -> tuple[str, ...]:
    """Set what differs, empty what is keyed by dead groups; name what was set. Main thread, function left."""
    changed: dict[str, None] = {}
    for item in _table() * 2:  # twice: some can be written only when another has been restored
        if _differs(item, baseline):
            changed[item.name] = None
            _try(partial(item.write, baseline.values[item.name]))
    for _, empty in groups.caches():
        _try(empty)
    return tuple(changed)


def fingerprint(baseline: Baseline) -> tuple[str, ...]:
    """Name what differs from a fresh process."""
    return tuple(item.name for item in _table() if _differs(item, baseline))


def _table() -> list[Item]:
    return [*items.items(), *groups.items()]


def _differs(item: Item, baseline: Baseline) -> bool:
    """Tell whether an item has another value than in a fresh process, as far as that is known."""
    if item.name not in baseline.values:
        return False
    try:
        return bool(_read(item) != baseline.values[item.name])
    except Absent:
        return False


def _read(item: Item) -> Any:
    """Read an item; that it cannot be read is a value too. Raises Absent alone.

    Torch refuses to tell its matmul precision once its old and its new way of setting it have been mixed.
    """
    try:
        return item.read()
    except Absent:
        raise
    except Exception as error:  # noqa: BLE001 - whatever torch objects to: it differs from a fresh process
        return f"unreadable: {type(error).__name__}"


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception:  # noqa: BLE001 - rule 1: the fingerprint names it
        return
