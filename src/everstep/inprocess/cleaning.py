"""What leaves a failed attempt behind: the pieces of this package in the order in which they must come.

Rule 1: children first (a data loader that dies waits for its workers), then frames (they hold groups), then groups,
        then the state that groups left, then one collection, then the threads that nothing holds any more.
Rule 2: an abort that is under way in another thread (it waits for the last one's) is waited for, and what any of an
        attempt's aborts found late counts.
Rule 3: what could not be made as new is named; the caller has this process replaced.
"""

import gc
import threading

from everstep.clock import SYSTEM, Clock
from everstep.inprocess import devices, frames, reset
from everstep.inprocess.communication import Communication
from everstep.inprocess.rendezvous import Meeting
from everstep.process import kernel

ABORT_S = 3.0
THREADS_S = 2.0


class Cleaning:
    """Implements `inprocess.call.Cleaner` for one process and all of its generations."""

    def __init__(self, abort_s: float = ABORT_S, threads_s: float = THREADS_S, clock: Clock = SYSTEM) -> None:
        self.communication = Communication(clock=clock)
        self.meeting = Meeting(self.communication)
        self.killed: tuple[str, ...] = ()
        """The children that the last attempt left, by name and pid."""
        self._abort_s, self._threads_s, self._clock = abort_s, threads_s, clock
        self._changed = threading.Condition()
        self._aborts = self._under_way = 0  # of this attempt
        self._late: list[str] = []
        self._baseline: reset.Baseline | None = None
        self._leftovers: frames.Leftovers | None = None

    def begin(self) -> None:
        """Before the function's first call, on its thread, our own threads running: note what "as new" means here."""
        if self._baseline is None:
            self.communication.watch()
            self._baseline = reset.record()
            self._leftovers = frames.Leftovers(self._clock)
            frames.settle()

    def abort(self) -> None:
        """End what the function may be waiting in. Any thread. Takes milliseconds; NCCL's join goes on behind.

        A second call in one attempt is the answer to clean-up that stands still: children started inside go as well.
        """
        with self._changed:
            again = self._aborts > 0
            self._aborts += 1
            self._under_way += 1
        late: tuple[str, ...] = ()
        try:
            aborted = self.communication.abort(self._abort_s)
            late = aborted.late + aborted.failed
        finally:
            with self._changed:
                self._under_way -= 1
                self._late += late
                self._changed.notify_all()
        if again and self._leftovers is not None:
            self._leftovers.kill_children()

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """Make this process as good as new; name what differs. Main thread, the function is off the stack."""
        if self._baseline is None or self._leftovers is None:
            raise RuntimeError("begin() comes before the function's first call: it notes what 'as new' means")
        if not self._aborts:
            self.abort()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, 2 * self._abort_s)
        self.killed = self._leftovers.kill_children()
        frames.drop(error)
        self.communication.finish()
        self.meeting.leave()
        reset.restore(self._baseline)
        gc.collect()
        self.communication.let_go()
        kernel.give_memory_back()  # each attempt's threads have arenas of their own: 3 MiB a restart stayed (seen)
        stayed = self._leftovers.threads(self._threads_s)
        with self._changed:
            late, self._late, self._aborts = tuple(dict.fromkeys(self._late)), [], 0
        lost = devices.context_trouble()  # kept, it would fail in every generation to come
        return (
            *([lost] if lost else ()),
            *reset.fingerprint(self._baseline),
            *(f"thread {name} did not end" for name in stayed),
            *(f"abort: {what}" for what in late + self.communication.failures()),
        )

    def close(self) -> None:
        """The wrapped call is over: take the groups down and give c10d back."""
        self.communication.unfinished(self._abort_s)
        self.communication.finish()
        self.communication.let_go()
        self.meeting.close()
        self.communication.unwatch()
