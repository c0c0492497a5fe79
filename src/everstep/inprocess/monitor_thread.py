"""Raising an exception in another thread, and a thread that does so when somebody is interrupted: NVRx's names.

The wrapper does not use them: `interrupt.Interrupter` raises by signal first, and pursues what is swallowed. They are
for code that was written against them.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Generator
from datetime import timedelta
from typing import Any

from everstep.clock import SYSTEM
from everstep.inprocess.interrupt import RankShouldRestart as RankShouldRestart
from everstep.telemetry import say

_RAISE_AGAIN_S = 0.1


def async_raise(tid: int, exc_type: type[BaseException], event: threading.Event | None = None) -> None:
    """Have `exc_type` raised in thread `tid` at its next bytecode; then set `event`. ValueError for no such thread."""
    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(tid), ctypes.py_object(exc_type))
    if event is not None:
        event.set()
    if not found:
        raise ValueError(f"there is no thread {tid}")


def delayed_async_raise(tid: int, exc_type: type[BaseException]) -> None:
    """The same from a thread of its own: for use inside a hook of the very thread that is meant."""
    threading.Thread(target=async_raise, args=(tid, exc_type), name="everstep-raise", daemon=True).start()


@contextlib.contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Generator[None]:
    """While this lasts, an `exc_type` that is swallowed in `__del__` or a callback is raised again in its thread."""
    before = sys.unraisablehook

    def heard(unraisable: Any) -> None:
        if unraisable.exc_type is not None and issubclass(unraisable.exc_type, exc_type):
            delayed_async_raise(threading.get_ident(), unraisable.exc_type)
        else:
            before(unraisable)

    sys.unraisablehook = heard
    try:
        yield
    finally:
        sys.unraisablehook = before


def async_abort_main_thread(msg: str | None = None) -> None:
    """Raise a RankShouldRestart, whose text is `msg`, in the main thread."""

    class Told(RankShouldRestart):
        def __str__(self) -> str:
            return msg or super().__str__()

    async_raise(threading.main_thread().ident or 0, Told)


class MonitorThread(threading.Thread):
    """Waits in `store` until somebody is interrupted; then aborts, and raises in the main thread until it is heard.

    `maybe_join` says that it was heard. `last_call_wait` is waited before the reasons are read.
    """

    def __init__(
        self,
        state: Any,
        store: Any,
        abort: Any,
        interval: timedelta,
        progress_watchdog: Any,
        soft_timeout: timedelta,
        last_call_wait: timedelta,
        atomic_lock: Any,
        daemon: bool,
    ) -> None:
        super().__init__(name="everstep-monitor", daemon=daemon)
        self.state, self.store, self.abort, self.interval = state, store, abort, interval
        self.progress_watchdog, self.soft_timeout = progress_watchdog, soft_timeout
        self.last_call_wait, self.atomic_lock = last_call_wait, atomic_lock
        self.should_stop = threading.Event()
        self.heard = threading.Event()

    def run(self) -> None:
        """See the class."""
        if not self._wait():
            return
        self.should_stop.wait(self.last_call_wait.total_seconds())
        self.store.lock_interruption_records()
        text = ", ".join(map(str, self.store.get_interruption_records()))
        with self.atomic_lock:
            if self.abort is not None:
                try:
                    self.abort(self.state.freeze() if hasattr(self.state, "freeze") else self.state)
                except Exception as error:  # noqa: BLE001 - a user's callback; the interrupt must come all the same
                    say(f"abort: {type(error).__name__}: {error}")
            self.progress_watchdog.pause_and_synchronize()
            async_abort_main_thread(text)
        while not self.heard.wait(self.soft_timeout.total_seconds()) and not self.should_stop.is_set():
            async_abort_main_thread(text)
            SYSTEM.sleep(_RAISE_AGAIN_S)

    def _wait(self) -> bool:
        while not self.should_stop.is_set():
            try:
                self.store.wait_for_interrupted(self.interval)
            except RuntimeError:  # torch says so when the time is over
                continue
            return True
        return False

    def maybe_join(self, timeout: float | None = None) -> None:
        """The main thread has left the function: raise no more, and wait for the thread's end."""
        self.heard.set()
        if self.ident is not None:
            self.join(timeout)

    def shutdown(self) -> None:
        """Wait for nobody any more, and end."""
        self.should_stop.set()
        self.maybe_join()
