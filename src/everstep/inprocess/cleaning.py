"""What leaves a failed attempt behind: the pieces of this package in the order in which they must come.

Rule 1: children first (a data loader that dies waits for its workers), then frames (they hold groups), then groups,
        then the state that groups left, then one collection, then the threads that nothing holds any more.
Rule 2: what could not be made as new is named; the caller has this process replaced.
"""

import gc

from everstep.clock import SYSTEM, Clock
from everstep.inprocess import frames, reset
from everstep.inprocess.abort import Aborted, Communication
from everstep.inprocess.rendezvous import Meeting

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
        self._aborted: Aborted | None = None
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
        """End what the function may be waiting in. Any thread. Takes milliseconds without NCCL.

        A second call in one attempt is the answer to clean-up that stands still: children started inside go as well.
        """
        again = self._aborted is not None
        self._aborted = self.communication.abort(self._abort_s)
        if again and self._leftovers is not None:
            self._leftovers.kill_children()

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """Make this process as good as new; name what differs. Main thread, the function is off the stack."""
        if self._baseline is None or self._leftovers is None:
            raise RuntimeError("begin() comes before the function's first call: it notes what 'as new' means")
        if self._aborted is None:
            self.abort()
        self.killed = self._leftovers.kill_children()
        frames.drop(error)
        self.communication.finish()
        self.meeting.leave()
        reset.restore(self._baseline)
        gc.collect()
        stayed = self._leftovers.threads(self._threads_s)
        aborted, self._aborted = self._aborted, None
        late = aborted.late + aborted.failed if aborted is not None else ()
        return (
            *reset.fingerprint(self._baseline),
            *(f"thread {name} did not end" for name in stayed),
            *(f"abort: {what}" for what in late),
        )

    def close(self) -> None:
        """The wrapped call is over: take the groups down and give c10d back."""
        self.communication.finish()
        self.meeting.close()
        self.communication.unwatch()
