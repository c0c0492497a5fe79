"""What a Checkpointer is told about its tiers, checked and put in order."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from everstep.checkpoint.core.retention import Keep, keep_of
from everstep.checkpoint.storage import opening
from everstep.errors import UsageError

MAIN, LOCAL, MEMORY, PEER = "disk", "local", "memory", "peer"
GRACE_S = 60.0
BUSY = ("coalesce", "block", "skip")


_MANGLED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


@dataclass(frozen=True, slots=True)
class Local:
    """A directory of this node beside the shared one: nearer, faster, and gone with the node."""

    directory: str | os.PathLike[str]
    interval: int
    keep: Keep | int | None = 2


Tiers = Mapping[str, int | Local]
"""By name: `memory` and `disk` with an interval, `local` with a `Local`."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """One directory."""

    tier: str
    directory: str
    interval: int
    keep: Keep


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the ranks must agree in."""

    on_busy: str
    tiers: tuple[TierSettings, ...]  # the main one first
    memory: int | None  # interval of snapshots beside those that the directories take
    grace: float = GRACE_S  # seconds

    @property
    def intervals(self) -> dict[str, int]:
        """By name of the tier."""
        found = {one.tier: one.interval for one in self.tiers}
        return found if self.memory is None else {**found, MEMORY: self.memory}

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        tiers = [asdict(one) for one in self.tiers]
        return {"on_busy": self.on_busy, "memory": self.memory, "grace": self.grace, "tiers": tiers}


def settings_of(
    directory: str,
    interval: int,
    on_busy: str,
    keep: Keep | int | None,
    tiers: Tiers | None,
    grace: float = GRACE_S,
) -> Settings:
    """Check and order what was given. UsageError for what cannot be meant."""
    if on_busy not in BUSY:
        raise UsageError(f"on_busy={on_busy!r}: write one of {', '.join(map(repr, BUSY))}")
    if not directory:
        raise UsageError("the directory has no name; give the place where checkpoints are to lie")
    asked = dict(tiers or {})
    strange = set(asked) - {MAIN, LOCAL, MEMORY}
    if strange:
        raise UsageError(f"tiers: {sorted(strange)[0]!r} is no tier; there are {MEMORY!r}, {LOCAL!r} and {MAIN!r}")
    main = asked.get(MAIN, interval)
    made = [TierSettings(MAIN, _place(directory), _interval(MAIN, main), keep_of(keep))]
    local = asked.get(LOCAL)
    if local is not None:
        if not isinstance(local, Local):
            raise UsageError(f"tiers: {LOCAL!r} is {local!r}; give it Local(directory, interval)")
        where = _place(os.fspath(local.directory))
        if opening.is_url(where):
            raise UsageError(f"tiers: {LOCAL!r} is {where}, which is no directory of this node; give it a path")
        if where == made[0].directory:
            raise UsageError(f"tiers: {LOCAL!r} and {MAIN!r} are one directory, {where}; give each its own")
        made.append(TierSettings(LOCAL, where, _interval(LOCAL, local.interval), keep_of(local.keep)))
    memory = asked.get(MEMORY)
    return Settings(on_busy, tuple(made), None if memory is None else _interval(MEMORY, memory), _grace(grace))


def _grace(grace: Any) -> float:
    if not isinstance(grace, int | float) or isinstance(grace, bool) or not 0 < grace < math.inf:
        raise UsageError(f"grace={grace!r}: give seconds, more than 0")
    return float(grace)


def _place(given: str) -> str:
    """Return an absolute path, or a URL."""
    if _MANGLED.match(given):
        raise UsageError(
            f"{given} is a URL that went through pathlib, which takes its slashes away; give it as a string"
        )
    return opening.place_of(given)


def _interval(tier: str, interval: Any) -> int:
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise UsageError(f"the interval of {tier!r} is {interval!r}; give a number of steps, 1 or more")
    return interval
