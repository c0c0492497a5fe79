"""Aborts that go on behind while the next generation begins.

NCCL's abort releases what waits in its kernels at once and then joins proxy threads that look up every half second.
Nothing of the next generation needs that join: other groups, other communicators, the same device. So it is left to
threads of its own.

Rule 1: `begin` returns when every call has been entered, or is about to be: whoever is let go by it may then move on.
Rule 2: such a thread holds its group, and nothing else does for long: the group's destructor waits for threads too, and
        runs where it makes nobody wait.
Rule 3: nobody waits for them but who aborts again, or ends the process; and each of those with a deadline.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.clock import SYSTEM, Clock

ENTERED_S = 1.0
"""Until a thread that was started must have run; it needs the interpreter lock for a moment."""


@dataclass(eq=False)
class _Call:
    """One abort under way."""

    name: str
    entered: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Behind:
    """The aborts of one process that have not returned yet. Any thread may call anything."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._failed: list[str] = []

    def begin(self, calls: Mapping[str, Callable[[], object]]) -> None:
        """Have each called in a thread of its own, all at the same time; one that runs already is not called again."""
        made: list[_Call] = []
        with self._lock:
            known = {call.name for call in self._calls}
            for name, function in calls.items():
                if name in known:
                    continue
                call = _Call(name)
                call.thread = threading.Thread(
                    target=self._run, args=(call, function), name=f"everstep-abort-{name}", daemon=True
                )
                made.append(call)
            self._calls += made
        for call in made:
            assert call.thread is not None
            call.thread.start()
        until = self._clock.now() + ENTERED_S
        for call in made:
            self._clock.wait(call.entered, max(0.0, until - self._clock.now()))

    def running(self) -> tuple[str, ...]:
        """Name the aborts that have not returned."""
        with self._lock:
            return tuple(call.name for call in self._calls)

    def failed(self) -> tuple[str, ...]:
        """Tell what failed since this was last asked, as "name: what it said"."""
        with self._lock:
            failed, self._failed = tuple(self._failed), []
            return failed

    def wait(self, deadline_s: float) -> tuple[str, ...]:
        """Wait for all that run, `deadline_s` together; name those that still do."""
        until = self._clock.now() + deadline_s
        with self._lock:
            threads = [call.thread for call in self._calls if call.thread is not None]
        for thread in threads:
            thread.join(max(0.0, until - self._clock.now()))
        return self.running()

    def _run(self, call: _Call, function: Callable[[], object]) -> None:
        call.entered.set()
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - one that fails keeps no other from being ended
            with self._lock:
                self._failed.append(f"{call.name}: {type(error).__name__}: {error}")
        finally:
            del function  # the group dies here (rule 2): before anybody may take the call for finished
            with self._lock:
                self._calls.remove(call)
