"""What a rank's own monitor says of its silence: heartbeats that do not come, sections that last too long.

Rule 1: each limit has its own clock: the first heartbeat, the next one, every open section, and what lies outside of
        all. The one that is the furthest over is told; an expired section is never hidden by one that was opened later.
Rule 2: limits that a script gives its sections stand in place of what is learned; those of heartbeats stand beside it,
        since they have defaults of an hour that say nothing about this run.
Rule 3: who has opened a section has come up: the first heartbeat is not waited for any more, and who never sends one
        is judged by its sections alone.
Rule 4: time in which nobody looked does not count (H5).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Gap = tuple[float, float]
"""(monotonic seconds of a look, seconds before it in which nobody had looked)"""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a rank's monitor has said, as far as it is judged. Monotonic seconds; a limit of 0 is none."""

    started_s: float
    beats: int
    beat_s: float
    initial_s: float
    subsequent_s: float
    outside_s: float  # since when no section is open; 0: one is
    outside_limit_s: float
    events: int  # sections opened and closed
    sections: tuple[tuple[str, float, float], ...] = ()  # open ones: name, since when, limit


@dataclass(frozen=True, slots=True)
class Claim:
    """The silence that is held against a rank by its own monitor."""

    quiet_s: float
    limit_s: float
    what: str
    firm: bool  # it stands in place of what is learned (rule 2)

    @property
    def over_s(self) -> float:
        """How much longer it has lasted than it may; below 0: how much longer it may."""
        return self.quiet_s - self.limit_s


def claim(watched: Watched, now: float, gaps: Sequence[Gap] = ()) -> Claim | None:
    """Return what counts now; None where no limit does."""
    found = [
        Claim(_looked(since, now, gaps), limit_s, what, firm)
        for since, limit_s, what, firm in _clocks(watched)
        if limit_s > 0
    ]
    return max(found, key=lambda one: one.over_s, default=None)


def _clocks(watched: Watched) -> Iterator[tuple[float, float, str, bool]]:
    if watched.beats:
        yield watched.beat_s, watched.subsequent_s, "no heartbeat", False
    elif not watched.events:
        yield watched.started_s, watched.initial_s, "no first heartbeat", False
    for name, opened_s, limit_s in watched.sections:
        yield opened_s, limit_s, f"section {name!r} is open", True
    if watched.outside_s and not watched.sections:
        yield watched.outside_s, watched.outside_limit_s, "no section is open", True


def _looked(since: float, now: float, gaps: Sequence[Gap]) -> float:
    """Seconds since then in which somebody looked."""
    away = sum(min(seconds, at - since) for at, seconds in gaps if at > since)
    return max(0.0, now - since - away)
