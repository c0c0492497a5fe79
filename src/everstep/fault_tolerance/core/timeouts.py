"""Timeouts that are calculated from what was seen: NVRx's formula, over the longest interval of each kind.

    timeout = safety factor × the longest interval that any rank has seen
    where the present timeout was calculated too: half of it, and half of the new one

That is how NVRx 0.4.1 calculates them (nvidia_resiliency_ext/fault_tolerance/timeouts_calc.py, Apache-2.0): the table
`tests/unit/fault_tolerance/nvrx/timeouts.json` was made by it, and holds this to its answers. Its weakness (W32: one
slow first step inflates it) is the formula's own; what Everstep learns by itself is in `launcher/core/learned.py`.

Intervals: to the first heartbeat, between heartbeats, of each section, and outside of all. Seconds, by one clock.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

UNSEEN = -1.0
_SHARE = 0.5  # of a new calculated timeout, where the present one was calculated too


@dataclass
class HeartbeatTimeouts:
    """Limits of heartbeats in seconds; None is no limit."""

    initial: float | None = None
    """From the start of monitoring to the first one."""
    subsequent: float | None = None
    were_calculated: bool | None = None

    @property
    def are_valid(self) -> bool:
        """Both are known."""
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """Limits of sections in seconds; None is no limit."""

    section: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    out_of_section: float | None = None
    """While no section is open."""
    calculated_sections: Collection[str] = field(default_factory=set[str])
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)

    @property
    def were_calculated(self) -> bool:
        """All of them."""
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        """All are known."""
        return all(limit is not None for limit in self.section.values()) and self.out_of_section is not None


class Seen:
    """The longest interval of each kind that this rank, or by way of `take` any rank, has seen."""

    def __init__(self, sections: Iterable[str], now: float) -> None:
        self.initial_s = self.subsequent_s = self.outside_s = UNSEEN
        self.sections_s: dict[str, float] = dict.fromkeys(sections, UNSEEN)
        self.begin(now)

    def begin(self, now: float) -> None:
        """Monitoring begins (again): intervals that were under way are none."""
        self.beats = 0
        self._beat_s = self._started_s = self._closed_s = now
        self.open: dict[str, float] = {}

    def beat(self, now: float) -> int:
        """A heartbeat; return its number since monitoring began."""
        lasted = now - self._beat_s
        if not self.beats:
            self.initial_s = max(self.initial_s, lasted)
        elif lasted > self.subsequent_s:
            self.subsequent_s = lasted
        self._beat_s = now
        self.beats += 1
        return self.beats

    def opened(self, section: str, now: float) -> None:
        """A section that is not open is opened."""
        self.look_outside(now)
        self.open[section] = now

    def closed(self, section: str, now: float) -> None:
        """One that is open is closed."""
        self.sections_s[section] = max(self.sections_s[section], now - self.open.pop(section))
        if not self.open:
            self._closed_s = now

    def look_outside(self, now: float) -> None:
        """Where no section is open that may have been the longest time so far."""
        if not self.open:
            self.outside_s = max(self.outside_s, now - self._closed_s)

    # -- what all ranks have seen ----------------------------------------------------------------------------------

    def give(self) -> list[float]:
        """Return all of it, in one order on all ranks."""
        return [self.initial_s, self.subsequent_s, self.outside_s, *self.sections_s.values()]

    def take(self, longest_s: Sequence[float]) -> None:
        """What `give` returned on each rank, the most of each: it is ours from here on."""
        self.initial_s, self.subsequent_s, self.outside_s = longest_s[:3]
        self.sections_s = dict(zip(self.sections_s, longest_s[3:], strict=True))

    # -- timeouts --------------------------------------------------------------------------------------------------

    def lacking(self, selected: Iterable[str] | None = None, *, outside: bool = False) -> list[str]:
        """Name what has not been seen yet of these sections (None: heartbeats), and of what is outside of them."""
        if selected is None:
            kinds = {"a first heartbeat": self.initial_s, "a second heartbeat": self.subsequent_s}
        else:
            kinds = {f"section {name!r}": self.sections_s[name] for name in selected}
            if outside:
                kinds["time outside of all sections"] = self.outside_s
        return [name for name, seen in kinds.items() if seen <= 0]

    def heartbeats(self, factor: float, current: HeartbeatTimeouts) -> HeartbeatTimeouts:
        """Calculate the limits of heartbeats; nothing may be lacking."""
        known = bool(current.were_calculated)
        return HeartbeatTimeouts(
            initial=_blend(factor * self.initial_s, current.initial if known else None),
            subsequent=_blend(factor * self.subsequent_s, current.subsequent if known else None),
            were_calculated=True,
        )

    def timeouts(
        self, factor: float, selected: Collection[str], current: SectionTimeouts, *, outside: bool
    ) -> SectionTimeouts:
        """Calculate the limits of these sections; the others keep theirs. Nothing may be lacking."""
        limits = dict(current.section)
        for name in selected:
            known = current.section[name] if name in current.calculated_sections else None
            limits[name] = _blend(factor * self.sections_s[name], known)
        outer = current.out_of_section
        if outside:
            outer = _blend(factor * self.outside_s, outer if current.is_out_of_section_calculated else None)
        return SectionTimeouts(
            section=limits,
            out_of_section=outer,
            calculated_sections=set(current.calculated_sections) | set(selected),
            is_out_of_section_calculated=current.is_out_of_section_calculated or outside,
        )


def _blend(new_s: float, known_s: float | None) -> float:
    return new_s if known_s is None else _SHARE * new_s + (1 - _SHARE) * known_s
