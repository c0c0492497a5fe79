"""Marks of progress, and the thread that takes the automatic ones: NVRx's names over our pulse.

The wrapper's own are on its page; this thread is for code that drives one by itself.
"""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from everstep.clock import SYSTEM, Clock
from everstep.process.pulse import Pulse


@dataclass
class Timestamp:
    """The last marks, in monotonic seconds; None: never. The manual one counts from its first on."""

    auto: float | None = None
    manual: float | None = None

    def is_timed_out(self, timeout: timedelta, clock: Clock = SYSTEM) -> bool:
        """Tell whether a mark is older than `timeout`."""
        now = clock.now()
        return any(mark is not None and now - mark > timeout.total_seconds() for mark in (self.auto, self.manual))


class Listener(Protocol):
    """Whoever is told of marks."""

    def send_timestamp(self, timestamp: Timestamp) -> object:
        """A mark was taken. Called from the watchdog's thread, and from the one that pings."""
        ...


class ProgressWatchdog(threading.Thread):
    """Every `interval` asks the main thread for a sign of life, and tells `monitor_process` of each."""

    def __init__(self, rank: int, monitor_process: Any, interval: timedelta, clock: Clock = SYSTEM) -> None:
        super().__init__(name=f"everstep-watchdog-{rank}", daemon=True)
        self.rank, self.monitor_process, self.interval = rank, monitor_process, interval
        self._clock = clock
        self._pulse = Pulse()
        self._stopped, self._running = threading.Event(), threading.Event()
        self._running.set()
        self._lock = threading.Lock()
        self._timestamp = Timestamp()

    def ping(self) -> None:
        """Give a manual mark; the first arms it."""
        self._mark(manual=self._clock.now())

    def reset(self) -> None:
        """An iteration begins: the automatic mark is now, the manual one not armed."""
        with self._lock:
            self._timestamp = Timestamp(auto=self._clock.now())

    def pause_and_synchronize(self) -> None:
        """Take no more marks; when this returns none is being taken. It does not wait for the main thread."""
        self._running.clear()
        with self._lock:
            pass

    def resume(self) -> None:
        """Take marks again."""
        self._running.set()

    def spin_till_paused(self) -> None:
        """Wait until no marks are taken."""
        while self._running.is_set() and not self._stopped.is_set():
            self._clock.wait(self._stopped, 0.01)

    def send(self) -> None:
        """Tell the last marks."""
        with self._lock:
            told = Timestamp(self._timestamp.auto, self._timestamp.manual)
        self.monitor_process.send_timestamp(told)

    def run(self) -> None:
        """Take automatic marks until `shutdown`."""
        while not self._clock.wait(self._stopped, self.interval.total_seconds()):
            if self._running.is_set() and self._pulse.beat():
                self._mark(auto=self._clock.now())

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread."""
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout)

    def _mark(self, auto: float | None = None, manual: float | None = None) -> None:
        with self._lock:
            self._timestamp = Timestamp(auto or self._timestamp.auto, manual or self._timestamp.manual)
        self.send()
