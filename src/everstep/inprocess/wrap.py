"""`Wrapper`, the decorator, and `CallWrapper`, what the function holds of it: NVRx's in-process restart.

    @everstep.inprocess.Wrapper(initialize=RetryController(max_iterations=10), health_check=CudaHealthCheck())
    def train(args, call: CallWrapper | None = None):
        torch.distributed.init_process_group("gloo")     # in every iteration, as it stands
        ...

Under `everstep run` faults are noticed by the agent and a lost rank is taken over by a spare, so the world keeps its
size; elsewhere siblings watch each other. docs/compat-nvrx.md tells what differs from NVRx, and why.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from everstep import environ
from everstep.errors import ConfigurationError, UsageError
from everstep.inprocess import call, injection, settings
from everstep.inprocess.abort import Abort, AbortTorchDistributed
from everstep.inprocess.call import Caller
from everstep.inprocess.completion import Completion
from everstep.inprocess.compose import Compose
from everstep.inprocess.finalize import Finalize, ThreadedFinalize
from everstep.inprocess.function import check_function
from everstep.inprocess.health_check import Confirmed, CudaHealthCheck, HealthCheck
from everstep.inprocess.initialize import Initialize, RetryController
from everstep.inprocess.iteration import Callbacks, Iterations, Marks
from everstep.inprocess.peers import Settings, open_peers
from everstep.inprocess.rank_assignment import ActivateAllRanks, RankAssignment, ShiftRanks
from everstep.inprocess.rank_filter import RankFilter
from everstep.inprocess.rhythm import Rhythm
from everstep.inprocess.state import State
from everstep.inprocess.store import PrefixStore, StoreMixin, TCPStore
from everstep.inprocess.terminate import Terminate

P = ParamSpec("P")
T = TypeVar("T")
ALIKE = 10
"""So many faults alike in a row, without a ping more than before, end a job whose user gave no budget (IR-16)."""
MANY = 1_000_000
"""Faults of many kinds never do: without steps nobody knows what was reached between them."""
STOP_S = 10.0
START_S = 300.0
_ABORT = AbortTorchDistributed()
_ASSIGNMENT: Any = Compose(ActivateAllRanks(), ShiftRanks())


class Wrapper:
    """Restarts a function on all ranks when a fault strikes one of them. Keyword arguments alone; see each below.

    `initialize`, `abort`, `finalize`, `health_check`, `completion`, `terminate`: callbacks, each an instance of its
    class or a `Compose` of several. `rank_assignment`, `rank_filter`: who runs the function, and as which rank.

    `soft_timeout`: silence of a rank after which all restart. `hard_timeout`: after which its process is ended. Left
    out, both are learned from the run; written out, they are meant as they stand. `barrier_timeout`: the most that a
    rank may take to leave an iteration before its process is replaced (10 s and what its callbacks may take, where that
    is known); also how long ranks wait for one another at the start where no agent started them.

    `enabled=False` hands the function back as it is. `monitor_process_logfile` and `monitor_process_pidfile` are
    absolute paths, in which `{rank}` stands for the first rank.

    Accepted and of no effect here, since nothing polls: the intervals, `heartbeat_timeout`, `completion_timeout`,
    `last_call_wait`, `termination_grace_time`; `store_factory` and `store_kwargs`, since no second store is opened.

    Raises TypeError for a value of another type, UsageError (a ValueError) for times that contradict each other.
    """

    def __init__(
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = _ABORT,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = _ASSIGNMENT,
        rank_filter: RankFilter | None = None,
        monitor_thread_interval: timedelta = settings.SECOND,
        monitor_process_interval: timedelta = settings.SECOND,
        heartbeat_interval: timedelta = settings.SECOND,
        progress_watchdog_interval: timedelta = settings.SECOND,
        soft_timeout: timedelta = settings.SOFT,
        hard_timeout: timedelta = settings.HARD,
        heartbeat_timeout: timedelta = settings.HEARTBEAT,
        barrier_timeout: timedelta = settings.BARRIER,
        completion_timeout: timedelta = settings.COMPLETION,
        last_call_wait: timedelta = settings.SECOND,
        termination_grace_time: timedelta = settings.GRACE,
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
    ) -> None:
        _check_types(
            store_kwargs=(store_kwargs, dict), initialize=(initialize, Initialize), abort=(abort, Abort),
            finalize=(finalize, Finalize), health_check=(health_check, HealthCheck), terminate=(terminate, Terminate),
            completion=(completion, Completion), rank_filter=(rank_filter, RankFilter),
            monitor_process_logfile=(monitor_process_logfile, str),
            monitor_process_pidfile=(monitor_process_pidfile, str),
        )  # fmt: skip
        _check_required(rank_assignment, store_factory)
        for name, path in (("logfile", monitor_process_logfile), ("pidfile", monitor_process_pidfile)):
            if path is not None and not Path(path).is_absolute():
                raise UsageError(f"Wrapper(monitor_process_{name}={path!r}): give an absolute path")
        if not dist.is_available():
            raise ConfigurationError("this torch is built without torch.distributed; install one that has it")
        self.store_factory, self.store_kwargs = store_factory, store_kwargs or {}
        self.monitor_process_logfile, self.monitor_process_pidfile = monitor_process_logfile, monitor_process_pidfile
        self.enabled = enabled
        self.callbacks = Callbacks(
            initialize=initialize, abort=abort, finalize=finalize, health_check=health_check, completion=completion,
            terminate=terminate, rank_assignment=rank_assignment, rank_filter=rank_filter,
        )  # fmt: skip
        self.times = settings.Times(
            monitor_thread_interval=monitor_thread_interval, monitor_process_interval=monitor_process_interval,
            heartbeat_interval=heartbeat_interval, progress_watchdog_interval=progress_watchdog_interval,
            soft_timeout=soft_timeout, hard_timeout=hard_timeout, heartbeat_timeout=heartbeat_timeout,
            barrier_timeout=barrier_timeout, completion_timeout=completion_timeout, last_call_wait=last_call_wait,
            termination_grace_time=termination_grace_time,
        )  # fmt: skip

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]:
        """Return `fn`, restarted on faults; it returns what `fn` returned on active ranks, None on those in reserve,
        when all have completed. Parameters annotated with `CallWrapper` are filled in.
        """
        if not self.enabled:
            return fn
        check_function(fn)

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return CallWrapper(self)(fn, args, kwargs)

        return wrapped

    def wishes(self) -> dict[str, Any]:
        """What the agent is told: the limits that were written out, how long leaving may take, how often to try."""
        times, tries = self.times, self._tries()
        told = {
            "automatic": True,
            "soft_s": times.soft_s,
            "hard_s": times.hard_s,
            "stop_s": self._leaving_s(),
            "alike": ALIKE if tries is None else tries + 1,
            "patience": MANY if tries is None else tries + 1,
            "least": self._least(),
        }
        return {name: value for name, value in told.items() if value is not None}

    def _leaving_s(self) -> float:
        """How long a rank may take to leave: our cleaning, and what its callbacks may; `barrier_timeout` at most."""
        most = self.times.barrier_timeout.total_seconds()
        spent = [_allowance(one) for one in (*_each(self.callbacks.finalize), *_each(self.callbacks.health_check))]
        return min(most, STOP_S + sum(most if seconds is None else seconds for seconds in spent))

    def _tries(self) -> int | None:
        """How many iterations its RetryControllers allow; None where none says so."""
        limits = [one.max_iterations for one in self._controllers() if one.max_iterations is not None]
        return min(limits, default=None)

    def _controllers(self) -> list[RetryController]:
        return [one for one in _each(self.callbacks.initialize) if isinstance(one, RetryController)]

    def peer_settings(self) -> dict[str, Any]:
        """The same for siblings that no agent started: a death shrinks the world, as NVRx has it."""
        told, times = self.wishes(), self.times
        return {
            "soft_s": times.soft_s,
            "automatic": True,
            "hard_s": times.hard_timeout.total_seconds(),
            "stop_deadline_s": told["stop_s"],
            "start_deadline_s": max(START_S, times.barrier_timeout.total_seconds()),
            "same_step_limit": told["alike"],
            "patience": told["patience"],
            "min_world_size": min(self._least(), environ.placement().world_size),
        }

    def _least(self) -> int:
        """With how few ranks its RetryControllers go on; each active one is a rank."""
        return max([max(one.min_world_size, one.min_active_world_size) for one in self._controllers()], default=1)


class CallWrapper:
    """One call of a wrapped function, as the function sees it."""

    def __init__(self, wrapper: Wrapper) -> None:
        if dist.is_initialized():
            raise UsageError(
                "a process group exists before the wrapped function is called, and could not be taken down in a "
                "restart: move init_process_group into the function"
            )
        self.wrapper = wrapper
        self._iterations: Iterations | None = None

    @property
    def iteration(self) -> int:
        """How many attempts came before this one."""
        return self._present.state.iteration

    @property
    def state(self) -> State:
        """This rank's place."""
        return self._present.state

    @property
    def store(self) -> PrefixStore:
        """Keys of this iteration, shared by its ranks; gone with it."""
        return self._present.store

    @property
    def base_store(self) -> PrefixStore:
        """The same: nothing outlives an iteration here, so that no key is met again."""
        return self._present.store

    @property
    def atomic_lock(self) -> Any:
        """The lock behind `atomic`."""
        return self._present.atomic_lock

    def ping(self) -> None:
        """Give a sign of progress. The first of an iteration arms the manual mark: from then on a loop that runs on
        without pinging is a hang too, after `soft_timeout`. Any thread; less than a microsecond.
        """
        self._present.marks.ping()

    def atomic(self) -> AbstractContextManager[None]:
        """A section in which this rank is neither interrupted nor its groups aborted. Keep it short: others wait."""
        return self._present.atomic()

    def disable_hang_protection(self) -> AbstractContextManager[None]:
        """A section in which silence is no hang, on any rank: for what may take as long as it likes."""
        return self._present.marks.unprotected()

    def _disable_hang_protection(self) -> None:
        """The same without its end."""
        self._present.marks.suspend()

    def _enable_hang_protection(self) -> None:
        """Its end."""
        self._present.marks.resume()

    def shutdown(self) -> None:
        """Let go of what the call holds; done by the call itself."""
        if self._iterations is not None:
            self._iterations.close()

    def __enter__(self) -> "CallWrapper":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __call__(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T | None:
        """Run `fn` in every iteration until all ranks have completed one."""
        with session_for_call(self.wrapper) as caller:
            return self._call(caller, fn, args, kwargs)

    def _call(self, caller: Caller, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T | None:
        session = caller.session
        marks, rhythm = Marks(session.page, session.clock), Rhythm(session.page, session.clock)
        ours = self._iterations = Iterations(self.wrapper.callbacks, marks, rhythm, session.clock)
        names = injection.wanted(fn, CallWrapper)

        def function() -> T:
            given, named = injection.fill(fn, names, self, args, dict(kwargs))
            return fn(*given, **named)

        with contextlib.closing(ours):
            result = caller.call(
                lambda assignment: ours.run(assignment, function), ours.interrupter, ours, self.wrapper.wishes(),
                rhythm.inside,
            )  # fmt: skip
            ours.completed()
            return result

    @property
    def _present(self) -> Iterations:
        if self._iterations is None:
            raise UsageError("this CallWrapper is used outside its call: it belongs to the wrapped function")
        return self._iterations


@contextlib.contextmanager
def session_for_call(wrapper: Wrapper) -> Generator[Caller]:
    """What drives the call: the agent where there is one, else siblings that watch each other, or a world of one.

    Raises ConfigurationError where ranks cannot meet, UsageError in a notebook that is one rank of several.
    """
    prepared = call.current()
    if prepared is not None:
        yield prepared
        return
    with open_peers(Settings(**wrapper.peer_settings())) as session:
        yield Caller(session)


def _each(callback: object) -> tuple[Any, ...]:
    """Return the members of a Compose, or the one that it is."""
    return () if callback is None else getattr(callback, "instances", (callback,))


def _allowance(callback: object) -> float | None:
    """Return how many seconds a finalizer or a check may take; None for a user's own: nobody knows."""
    if isinstance(callback, ThreadedFinalize):
        return callback.timeout.total_seconds()
    if isinstance(callback, Confirmed):
        return callback.most_s
    if isinstance(callback, CudaHealthCheck):
        return callback.timeout.total_seconds() if torch.cuda.is_available() else 0.0
    return 0.0 if type(callback).__module__ == CudaHealthCheck.__module__ else None


def _check_types(**given: tuple[object, type]) -> None:
    for name, (value, kind) in given.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"Wrapper({name}={value!r}): a {kind.__name__} or None is expected")


def _check_required(rank_assignment: object, store_factory: object) -> None:
    if not isinstance(rank_assignment, RankAssignment):
        raise TypeError(f"Wrapper(rank_assignment={rank_assignment!r}): a RankAssignment is expected")
    if not isinstance(store_factory, type) or not issubclass(store_factory, StoreMixin):
        raise TypeError(f"Wrapper(store_factory={store_factory!r}): a class derived from StoreMixin is expected")
