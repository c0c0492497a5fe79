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
            values[item.name] = item.fresh if item.always else item.read()
        except Absent:
            if item.fresh is UNKNOWN:
                missing.append(item.name)
            else:
                values[item.name] = item.fresh
    return Baseline(values, tuple(missing))


def restore(baseline: Baseline) -> tuple[str, ...]:
    """Set what differs, empty what is keyed by dead groups; name what was set. Main thread, function left."""
    changed: list[str] = []
    for item in _table():
        if _differs(item, baseline):
            changed.append(item.name)
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
        return bool(item.read() != baseline.values[item.name])
    except Absent:
        return False


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception:  # noqa: BLE001 - rule 1: the fingerprint names it
        return
