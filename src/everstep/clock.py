"""One door to time: the only module that imports `time`.

Everything that decides gets `now` as an argument; everything that waits is given a `Clock`. Seconds are floats.
"""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic and wall time, and the two ways to let it pass."""

    def now(self) -> float:
        """Monotonic seconds; comparable between processes of one boot (CLOCK_MONOTONIC), never across nodes."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` has passed; True if it was set."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass. For pacing, never to synchronise."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """See `Clock.wait`."""
        return event.wait(timeout_s)

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)


def cpu_of(thread: int) -> float:
    """CPU seconds that a thread of this process has used. `thread` is its `get_ident()`, and it must be alive."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


SYSTEM: Clock = SystemClock()
"""The clock that drivers use where none is given."""
