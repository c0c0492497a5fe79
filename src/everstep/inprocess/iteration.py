"""One wrapped call, iteration after iteration: NVRx's callbacks in NVRx's order, on the engine that recovers.

    a generation begins    rank assignment → RANK, WORLD_SIZE → initialize → health check → the function (or reserve)
    it is left             abort (another thread) → the function unwinds → finalize → clean → health check
    all have completed     completion
    this rank leaves       terminate, then the process ends or is replaced

Rule 1: a rank that is inactive, or discarded by an assignment, waits in reserve: it has completed at once, and takes
        part again when the next generation begins.
Rule 2: what `finalize` and the health checks raise ends this rank: its process is replaced, by a spare where there is
        one. An Exception of `initialize` or of the function makes another generation.
Rule 3: callbacks of the abort have a limit of time, and what they raise is told (W18). Whatever they do, the engine
        severs what connects this rank.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from everstep.clock import Clock
from everstep.inprocess import bounded
from everstep.inprocess.abort import ABORT_S, Abort, severing
from everstep.inprocess.assignment import Assignment
from everstep.inprocess.cleaning import Cleaning
from everstep.inprocess.completion import Completion
from everstep.inprocess.exception import HealthCheckError, RestartAbort
from everstep.inprocess.finalize import Finalize
from everstep.inprocess.function import in_this_process
from everstep.inprocess.health_check import HealthCheck
from everstep.inprocess.initialize import Initialize
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart
from everstep.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, RankDiscarded
from everstep.inprocess.rank_assignment.context import remaining
from everstep.inprocess.rank_filter import RankFilter
from everstep.inprocess.rhythm import Rhythm
from everstep.inprocess.state import Mode, State
from everstep.inprocess.store import PrefixStore
from everstep.inprocess.terminate import Terminate
from everstep.process.page import Page, Phase
from everstep.telemetry import say

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """What the user has the wrapper call."""

    initialize: Initialize | None
    abort: Abort | None
    finalize: Finalize | None
    health_check: HealthCheck | None
    completion: Completion | None
    terminate: Terminate | None
    rank_assignment: RankAssignment
    rank_filter: RankFilter | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the active ranks of a generation meet; see `rendezvous.Place`."""

    generation: int
    epoch: int
    rank: int
    world_size: int
    store: tuple[str, int]


class Marks:
    """The signs of progress of one rank, on its page; the automatic one, the main thread's pulse, is the ticker's.

    How often a function has pinged tells whether an attempt came further than those before it. It is no step: limits
    are not learned from it, for a user pings where it suits. They are learned from what `rhythm.Rhythm` sees.
    """

    def __init__(self, page: Page, clock: Clock) -> None:
        self._page, self._clock = page, clock
        self._pings = 0

    def begin(self) -> None:
        """The function is about to be entered."""
        self._pings = 0
        self._page.resumed(0, self._clock.now())
        self._page.undeclared(self._clock.now())

    def ping(self) -> None:
        """See `CallWrapper.ping`. Any thread; stores into shared memory."""
        now = self._clock.now()
        self._pings += 1
        self._page.resumed(self._pings, now)
        self._page.ping(now)

    def suspend(self) -> None:
        """From here on no limit applies, on any rank."""
        self._page.phase(Phase.DECLARED, self._clock.now(), 0.0, "hang protection disabled")

    def resume(self) -> None:
        """Limits apply again, from now on."""
        self._page.phase(Phase.STEP, self._clock.now())

    @contextlib.contextmanager
    def unprotected(self) -> Generator[None]:
        """See `suspend` and `resume`. A function that is left inside is not resumed: it says nothing any more."""
        self.suspend()
        yield
        self.resume()


class Iterations:
    """Implements `call.Cleaner` for a wrapped call, and runs its generations."""

    def __init__(self, callbacks: Callbacks, marks: Marks, rhythm: Rhythm, clock: Clock) -> None:
        self.callbacks, self.marks, self.rhythm = callbacks, marks, rhythm
        self.interrupter = Interrupter()
        self.atomic_lock = threading.RLock()
        self.state = State(0, 1)
        self._cleaning = Cleaning(clock=clock)
        self._known = False  # whether `state` is of this rank
        self._abort_due = False
        self._depth = 0  # of atomic sections
        self._unfit: BaseException | None = None
        self._store: PrefixStore | None = None

    # -- a generation --------------------------------------------------------------------------------------------

    def run(self, assignment: Assignment, function: Callable[[], T]) -> T | None:
        """Run one generation on the thread of the call; see rule 1 for what reserve ranks return."""
        self._enter(assignment)
        meeting = self._cleaning.meeting
        with meeting.entered(assignment):
            if not self._assign(assignment):
                return None
            with (
                meeting.entered(self._place(assignment)) if self.state.mode is Mode.ACTIVE else contextlib.nullcontext()
            ):
                return self._attempt(function)

    def _enter(self, assignment: Assignment) -> None:
        rank, size = assignment.rank, assignment.world_size
        if not self._known:
            self.state = State(rank, size, initial_rank=rank, initial_world_size=size)
            self._known = True
        state = self.state
        state.rank, state.world_size = rank, size
        state.active_rank = state.active_world_size = None
        state.iteration = max(0, assignment.generation - 1)
        state.fn_exception = None
        self._abort_due, self._depth = False, 0

    def _assign(self, assignment: Assignment) -> bool:
        """Have the pipeline choose; False where it discards this rank."""
        ctx = RankAssignmentCtx(self.state, _Lazily(self), set())
        try:
            with self._cleaning.communication.opening():  # an abort ends the wait for what other ranks say
                ctx = self.callbacks.rank_assignment(ctx)
        except RankDiscarded as discarded:
            if not remaining(ctx):
                raise RestartAbort(f"{discarded}: no rank is left that would run the function") from None
            say(f"{discarded}; it waits in reserve")
            self.state.mode = Mode.INACTIVE
            self.state.iteration = assignment.generation
            return False
        self.state.copy_from(ctx.state)
        if self.callbacks.rank_filter is not None:
            self.state.copy_from(self.callbacks.rank_filter(self.state))
        self.state.iteration = assignment.generation
        self._somebody_is_active()
        self.state.set_distributed_vars()
        return True

    def _somebody_is_active(self) -> None:
        """A job that nobody works on would be done at once, and well. Raises RestartAbort."""
        state = self.state
        if state.mode not in (Mode.ACTIVE, Mode.INACTIVE):
            raise RestartAbort(
                f"rank_assignment has left rank {state.rank} in mode {state.mode.name}, neither active nor in reserve: "
                "compose it with ActivateAllRanks() or another that activates ranks"
            )
        if not state.active_world_size:
            raise RestartAbort(
                f"rank_assignment has left no rank active of {state.world_size}: nobody would run the function"
            )

    def _place(self, assignment: Assignment) -> Place:
        rank, size = self.state.active_rank, self.state.active_world_size
        assert rank is not None and size is not None, "an active rank has a number"  # noqa: PT018
        return Place(assignment.generation, assignment.epoch, rank, size, assignment.store)

    def _attempt(self, function: Callable[[], T]) -> T | None:
        calls = self.callbacks
        self.marks.begin()
        self.rhythm.begin()
        try:
            if calls.initialize is not None:
                calls.initialize(self.state.freeze())
            if calls.health_check is not None:
                self._check(calls.health_check)
            return self._function(function) if self.state.mode is Mode.ACTIVE else None
        except (RankShouldRestart, Exception):
            raise
        except BaseException as end:
            self._leave(end)
            raise

    def _function(self, function: Callable[[], T]) -> T:
        try:
            return in_this_process(function)
        except Exception as error:
            self.state.fn_exception = error
            raise

    def _check(self, health_check: HealthCheck) -> None:
        try:
            health_check(self.state.freeze())
        except Exception as error:
            self._unfit = error
            raise

    def _leave(self, end: BaseException) -> None:
        """A BaseException ends this rank, or the whole job where it asks for that.

        Unless this iteration is being left: then it is what the function made of our interrupt.
        """
        left = self.interrupter.wanted == self.state.iteration
        if left or (isinstance(end, SystemExit) and end.code in (None, 0)):
            return
        if not isinstance(end, SystemExit | KeyboardInterrupt | RestartAbort):
            self._unfit = end
        self._terminate()

    def _terminate(self) -> None:
        if self.state.mode is Mode.TERMINATED:
            return
        self.state.mode = Mode.TERMINATED
        if self.callbacks.terminate is not None:
            try:
                self.callbacks.terminate(self.state.freeze())
            except Exception as error:  # noqa: BLE001 - it leaves anyway
                say(f"rank {self.state.rank}: terminate: {type(error).__name__}: {error}")

    def completed(self) -> None:
        """All ranks have completed, and the call is about to return here."""
        if self.callbacks.completion is not None:
            try:
                self.callbacks.completion(self.state.freeze())
            except Exception as error:  # noqa: BLE001 - as NVRx has it: told, and nothing else
                say(f"rank {self.state.rank}: completion: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def atomic(self) -> Generator[None]:
        """See `CallWrapper.atomic`. An abort that came meanwhile is made up for at the end."""
        self._depth += 1
        try:
            with self.interrupter.atomic(), self.atomic_lock:
                if self._depth == 1 and self.interrupter.wanted == self.state.iteration:
                    raise RankShouldRestart(self.state.iteration)
                yield
        finally:
            self._depth -= 1
            if self._abort_due and not self._depth:
                self._abort_due = False
                self._abort_now()

    @property
    def store(self) -> PrefixStore:
        """This generation's own keys on the store that the ranks meet on. The function's thread."""
        if self._store is None:
            with self._cleaning.communication.opening():
                self._store = PrefixStore(self.state.iteration, self._cleaning.meeting.aside())
        return self._store

    # -- Cleaner -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Cleaner.begin`."""
        self._cleaning.begin()

    def abort(self) -> None:
        """See `Cleaner.abort`. Not while an atomic section is entered: it comes at its end."""
        for _ in range(2):  # it may be left between the question and the note
            if self.atomic_lock.acquire(blocking=False):
                self._abort_due = False
                try:
                    self._abort_now()
                finally:
                    self.atomic_lock.release()
                return
            self._abort_due = True

    def _abort_now(self) -> None:
        callback, state, severed = self.callbacks.abort, self.state.freeze(), threading.Event()

        def sever() -> None:
            """Once: by the callback that is made for it, or after all callbacks."""
            if not severed.is_set():
                severed.set()
                self._cleaning.abort()

        if callback is not None:
            with severing(sever):
                outcome = bounded.run("abort", lambda: callback(state), ABORT_S)
            if outcome.late:
                say(f"rank {state.rank}: abort: {callback!r} is not done after {ABORT_S:g} s; it is not waited for")
            elif outcome.error is not None:
                say(f"rank {state.rank}: abort: {type(outcome.error).__name__}: {outcome.error}")
        sever()

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """See `Cleaner.clean`."""
        self._store = None
        try:
            if self._unfit is not None:
                raise HealthCheckError(f"{type(self._unfit).__name__}: {self._unfit}")
            if self.callbacks.finalize is not None:
                self.callbacks.finalize(self.state.freeze())
            dirt = self._cleaning.clean(error)
            if self.callbacks.health_check is not None:
                self.callbacks.health_check(self.state.freeze())
        except Exception:
            self._terminate()
            raise
        return dirt

    def tick(self) -> None:
        """See `Cleaner.tick`: nothing."""

    def close(self) -> None:
        """The call is over."""
        self.rhythm.close()
        self._cleaning.close()


class _Lazily:
    """The exchange that assignments are given: opened by the first that wants it, which is the same on every rank."""

    def __init__(self, owner: Iterations) -> None:
        self._owner = owner

    def exchange(self, name: str, rank: int, text: str, ranks: Sequence[int], timeout: timedelta) -> dict[int, str]:
        """See `Exchange.exchange`."""
        return self._owner.store.exchange(name, rank, text, ranks, timeout)

    def __getattr__(self, name: str) -> Any:
        """What else a user's own assignment wants of its store."""
        return getattr(self._owner.store, name)
