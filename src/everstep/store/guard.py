"""Deadlines for calls that keep none of their own.

TCPStore's calls ignore their timeout when the host is frozen or cut off (EXPERIMENTS E1, P1). The one thing that ends
such a call is the end of its connection: `shutdown(2)` on its descriptor, from another thread (E3: at once). A `Guard`
is that thread. It sleeps on a condition until the next deadline, in Python, never inside C++ (P11).

Rule 1: a call that ends in time wakes nobody. The thread sleeps on until the deadline that it knows of, and only a call
        whose deadline is nearer wakes it: two switches of threads a call would cost more than the call.
"""

import heapq
import itertools
import math
import threading
from collections.abc import Callable
from types import TracebackType

from everstep.clock import SYSTEM


class Watch:
    """One guarded call: a context manager. After it, `fired` says whether the deadline came first."""

    def __init__(self, guard: "Guard", deadline: float, sever: Callable[[], None]) -> None:
        self.deadline, self.sever = deadline, sever
        self.fired = self.over = False
        self._guard = guard

    def __enter__(self) -> "Watch":
        self._guard.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._guard.drop(self)


class Guard:
    """A thread that ends late calls. Close it, and the thread is joined."""

    def __init__(self, name: str) -> None:
        self._waiting: list[tuple[float, int, Watch]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._wakes = math.inf  # when the thread looks again by itself
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"everstep-guard-{name}", daemon=True)
        self._thread.start()

    def watch(self, timeout_s: float, sever: Callable[[], None]) -> Watch:
        """Return the context in which a call has `timeout_s` seconds, after which `sever` is called."""
        return Watch(self, SYSTEM.now() + timeout_s, sever)

    def add(self, watch: Watch) -> None:
        """A call begins."""
        with self._changed:
            heapq.heappush(self._waiting, (watch.deadline, next(self._numbers), watch))
            if watch.deadline < self._wakes:
                self._wakes = watch.deadline
                self._changed.notify()

    def drop(self, watch: Watch) -> None:
        """A call has ended; its deadline is void. After this returns, `watch.sever` is not called any more."""
        with self._changed:
            watch.over = True
            while self._waiting and self._waiting[0][2].over:
                heapq.heappop(self._waiting)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._wakes = self._waiting[0][0] if self._waiting else math.inf
                left = self._wakes - SYSTEM.now()
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                    continue
                _, _, watch = heapq.heappop(self._waiting)
                if not watch.over:
                    watch.fired = True
                    watch.sever()

    def close(self) -> None:
        """End the thread and wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
