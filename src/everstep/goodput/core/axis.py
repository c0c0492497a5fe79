"""One axis of time for the records of several processes, nodes and boots.

Rule 1: within one boot, monotonic time decides; a wall clock that jumps moves nothing (EXPERIMENTS L3).
Rule 2: between boots, each boot's offset is the median of (wall - monotonic) over its own records, and the spread of
these pairs is the bound that figures across nodes carry.
Rule 3: the axis counts whole nanoseconds, so that parts add up to the whole exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from everstep.events import Record, Stamp

NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Return whole nanoseconds."""
    return round(seconds * NS)


def to_s(nanoseconds: int) -> float:
    """Return seconds."""
    return nanoseconds / NS


@dataclass(frozen=True, slots=True)
class Axis:
    """Where each boot's monotonic zero lies on the common axis, in nanoseconds since 1970 by the wall clocks."""

    offsets: dict[str, int]
    bounds: dict[str, int]

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Axis":
        """Find every boot's offset from the pairs that its records carry."""
        pairs: dict[str, list[int]] = {}
        for record in records:
            at = record.stamp
            pairs.setdefault(at.boot_id, []).append(to_ns(at.wall_s) - to_ns(at.mono_s))
        offsets = {boot: median_low(found) for boot, found in pairs.items()}
        bounds = {boot: max(abs(pair - offsets[boot]) for pair in found) for boot, found in pairs.items()}
        return cls(offsets, bounds)

    @property
    def bound_s(self) -> float:
        """What a figure that compares two boots may be off by; 0 where all records are of one boot."""
        return to_s(sum(sorted(self.bounds.values())[-2:])) if len(self.bounds) > 1 else 0.0

    def place(self, stamp: Stamp) -> int:
        """Return the moment of `stamp`."""
        return self.moment(stamp.mono_s, stamp.boot_id)

    def moment(self, mono_s: float, boot_id: str) -> int:
        """Return the moment of a monotonic time of one boot."""
        return to_ns(mono_s) + self.offsets[boot_id]
