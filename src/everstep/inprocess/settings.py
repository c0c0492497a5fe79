"""The times that a wrapper is given: checked against one another, and told apart from those that were left out.

A value left out is learned from the run, with NVRx's default as its ceiling; the same number written out is meant as it
stands. The default objects themselves tell the two apart: compare them with `is`.
"""

from dataclasses import dataclass, fields
from datetime import timedelta

from everstep.errors import UsageError

SOFT = timedelta(seconds=60)
HARD = timedelta(seconds=90)
BARRIER = timedelta(seconds=120)
COMPLETION = timedelta(seconds=120)
HEARTBEAT = timedelta(seconds=30)
SECOND = timedelta(seconds=1)
GRACE = timedelta(seconds=5)

_ORDER = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""The first must be less than the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a wrapper was given."""

    monitor_thread_interval: timedelta
    monitor_process_interval: timedelta
    heartbeat_interval: timedelta
    progress_watchdog_interval: timedelta
    soft_timeout: timedelta
    hard_timeout: timedelta
    heartbeat_timeout: timedelta
    barrier_timeout: timedelta
    completion_timeout: timedelta
    last_call_wait: timedelta
    termination_grace_time: timedelta

    def __post_init__(self) -> None:
        """Raise TypeError for what is no timedelta, UsageError (a ValueError) for what contradicts itself."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, timedelta):
                raise TypeError(
                    f"Wrapper({field.name}={value!r}): a datetime.timedelta is expected; write timedelta(seconds=…)"
                )
        for less, more in _ORDER:
            if not getattr(self, less) < getattr(self, more):
                raise UsageError(
                    f"Wrapper({less}={getattr(self, less).total_seconds():g} s) must be less than "
                    f"{more}={getattr(self, more).total_seconds():g} s; raise the one or lower the other"
                )

    @property
    def soft_s(self) -> float | None:
        """Seconds; None where it was left out."""
        return None if self.soft_timeout is SOFT else self.soft_timeout.total_seconds()

    @property
    def hard_s(self) -> float | None:
        """Seconds; None where it was left out."""
        return None if self.hard_timeout is HARD else self.hard_timeout.total_seconds()
