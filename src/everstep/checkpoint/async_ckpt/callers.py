"""A call in the background, and who has it made: `AsyncRequest` and the two callers.

Rule 1: a call is done when its function has returned. One that raised, a worker that was killed or has left: that is a
CheckpointError at the next look, and no finalize function of it runs, on any rank (W41, W42).
Rule 2: nobody waits without end for a process that is gone, nor for a rank (`agreement`).
Rule 3: a file is written by one caller at a time: what an aborted attempt left under way is dropped when the next one
saves to the same name, and can neither end nor overwrite its save (CS-39).

Rejected: a fork of the trainer (CS-08), `multiprocessing` (a guard around the script, a Manager beside each worker).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from everstep.checkpoint.async_ckpt import agreement
from everstep.checkpoint.async_ckpt.jobs import Running, ThreadJob, prepared, writer_of
from everstep.checkpoint.async_ckpt.process import SAVERS, Outcome, Saver
from everstep.checkpoint.async_ckpt.region import Pool
from everstep.errors import CheckpointError
from everstep.telemetry import say

_DONE, _UNDER_WAY, _FAILED = 0, 1, 2


class AsyncRequest(NamedTuple):
    """A call to be made in the background, and what follows it.

    `async_fn` (None: nothing to do) is called with `async_fn_args` and `async_fn_kwargs` in another process, after
    `preload_fn`, if there is one, was called here and its result put in the place of the second argument. Afterwards
    every function of `finalize_fns` is called here, in order, once the call is done on all ranks.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Have `fn` called after those that are there. RuntimeError once it is frozen, which scheduling does."""
        if self.is_frozen:
            raise RuntimeError(
                f"call {self.call_idx} is scheduled already: add finalize functions before schedule_async_request"
            )
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of it here and now, as the background would. All ranks together.

        Raises what the function raised; on the other ranks CheckpointError, and nothing is finalized.
        """
        failed: BaseException | None = None
        try:
            if self.async_fn is not None:
                self.async_fn(*self.arguments(), **(self.async_fn_kwargs or {}))
        except Exception as error:  # noqa: BLE001 - the others must hear of it first
            failed = error
        ranks = [rank for rank, state in enumerate(agreement.gathered(_FAILED if failed else _DONE)) if state]
        if failed is not None:
            raise failed
        if ranks:
            raise CheckpointError(f"the save failed on {_ranks(ranks)}; nothing of it is finalized")
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def arguments(self) -> list[Any]:
        """Return the arguments, preloaded."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            args[1] = self.preload_fn()
        return args

    def freeze(self) -> "AsyncRequest":
        """Return the same, closed to further finalize functions."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalize functions; return `call_idx`.

        With `validate_matching_call_idx` all ranks must finalize the same call, else CheckpointError before any does.
        """
        if validate_matching_call_idx:
            found = agreement.gathered(self.call_idx)
            if set(found) != {self.call_idx}:
                raise CheckpointError(
                    f"ranks finalize different calls: {dict(enumerate(found))}. All ranks must schedule the same saves "
                    "and ask for their end at the same steps."
                )
        for fn in self.finalize_fns:
            fn()
        return self.call_idx


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class AsyncCaller(ABC):
    """Has calls made in the background, and says when the oldest of them is done on all ranks."""

    def __init__(self) -> None:
        self.process: Saver | None = None
        self.start_time: float | None = None
        self.rank: int | None = None

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Begin a call, or put it behind those that wait. When it returns, tensors are copied."""

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool, no_dist: bool) -> bool:
        """Say whether the oldest call has ended, here (`no_dist`) or on all ranks; `blocking` waits for its end here.

        Raises CheckpointError, once, where it has failed; the next look is at the next call.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Return True where no rank's call is under way. All ranks together."""
        return not any(agreement.gathered(int(is_alive)))

    def register_worker_restart_callback(self, fn: Callable[[], Any]) -> None:
        """Have `fn` called, here, whenever a new worker takes the place of one that is gone."""
        raise NotImplementedError

    def cleanup_worker_data_cache(self) -> None:
        """Give back the memory that is kept for the next save."""
        raise NotImplementedError

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Wait for what is under way, and let the worker go; with `abort` end it now."""

    @abstractmethod
    def __del__(self) -> None: ...


class ProcessCaller(AsyncCaller):
    """What both callers are."""

    def __init__(self, cpu_priority: int | None = 10, io_priority: int | None = None) -> None:
        super().__init__()
        self.owner: Any = self
        self._nice, self._io = cpu_priority, io_priority
        self._pool = Pool()
        self._running: deque[Running] = deque()
        self._late: list[Running] = []
        self._callbacks: list[Callable[[], Any]] = []

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See `AsyncCaller.schedule_async_call`. Raises MemoryShortage, and what `preload_fn` raises."""
        self._mine()
        self._tidy()
        sweep()
        if self.rank is None:
            self.rank = dist.get_rank() if dist.is_initialized() else 0
        job = prepared(async_req, self._pool)
        if job is not None and job.path:
            self._alone(job.path)
        running = Running(job, self)
        if job is not None and not isinstance(job, ThreadJob):
            running.begin(self._worker())
        self._running.append(running)

    def _mine(self) -> None:
        """In a forked child of the trainer begin anew: the worker and the memory are its parent's."""
        if self.process is not None and not self.process.ours:
            self.process, self._pool = None, Pool()
            self._running.clear()
            self._late.clear()

    def _alone(self, path: str) -> None:
        """See rule 3. What this queue itself writes to that name in another process is waited for."""
        other = writer_of(path)
        if other is None or other is self or not other.writes(path):
            return
        if other.owner is self.owner:
            other.settle(None)
            return
        say(f"an earlier save of {path} is still being written by another queue, and is dropped for the new one")
        other.owner.close(abort=True)

    def _worker(self) -> Saver:
        if self.process is not None and not self.process.alive:
            for running in self._running:
                running.look(0.0)  # what it had been given learns of its end from its line
            self.process.end()
            self.process = None
            for fn in self._callbacks:
                fn()
        if self.process is None:
            self.process = Saver(self._nice, self._io)
        return self.process

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See `AsyncCaller.is_current_async_call_done`."""
        self._mine()
        self._tidy()
        outcome = self._running[0].look(None if blocking else 0.0) if self._running else Outcome()
        state = _UNDER_WAY if outcome is None else _FAILED if outcome.failed else _DONE
        states = [state] if no_dist else agreement.gathered(state)
        failed = [rank for rank, found in enumerate(states) if found == _FAILED]
        if not failed and _UNDER_WAY in states:
            return False
        running = self._running.popleft() if self._running else None
        if running is not None:
            self._leave(running, outcome, bool(failed))
        if failed:
            _raise(outcome, failed, no_dist, running.path if running is not None else "")
        return True

    def _leave(self, running: Running, outcome: Outcome | None, failed: bool) -> None:
        if outcome is None:
            self._late.append(running)  # another rank has failed; ours ends when it ends, and is taken away then
        else:
            running.end(Outcome("another rank failed") if failed and not outcome.failed else outcome)

    def _tidy(self) -> None:
        over = [one for one in self._late if one.look(0.0) is not None]
        self._late = [one for one in self._late if one not in over]
        for one in over:
            one.end(Outcome("another rank failed"))

    def settle(self, timeout_s: float | None) -> bool:
        """Wait for the end of all that is under way, here; False where it is not over in time."""
        return all(running.look(timeout_s) is not None for running in [*self._running, *self._late])

    def writes(self, path: str) -> bool:
        """True while a file of that name is being written."""
        return any(one.path == path and one.look(0.0) is None for one in [*self._running, *self._late])

    def register_worker_restart_callback(self, fn: Callable[[], Any]) -> None:
        """See `AsyncCaller.register_worker_restart_callback`."""
        self._callbacks.append(fn)

    def cleanup_worker_data_cache(self) -> None:
        """See `AsyncCaller.cleanup_worker_data_cache`."""
        self._pool.clear()

    def close(self, abort: bool = False) -> None:
        """See `AsyncCaller.close`. What failed and was not looked at yet is told on stderr."""
        self._mine()
        if not abort:
            self.settle(None)
        if self.process is not None:
            self.process.kill()
        for running in [*self._running, *self._late]:
            outcome = running.look(0.0) or Outcome("it was aborted")
            if outcome.failed and not abort:
                say(f"a save in the background failed: {outcome.text}")
            running.end(outcome)
        self._running.clear()
        self._late.clear()
        if self.process is not None:
            self.process.end()
            self.process = None
        self._pool.clear()

    def __del__(self) -> None:
        """Nobody asks any more: what is under way is seen to its end by the interpreter's."""
        process: Saver | None = getattr(self, "process", None)
        if process is not None:
            process.abandoned = True


class TemporalAsyncCaller(ProcessCaller):
    """A process for each call, started for it and ended with it. `PersistentAsyncCaller` does without the start."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See `AsyncCaller.is_current_async_call_done`."""
        over = True
        try:
            over = super().is_current_async_call_done(blocking, no_dist)
        finally:
            if over and not self._late:
                self.close(abort=True)
        return over


class PersistentAsyncCaller(ProcessCaller):
    """One process for all calls of a queue, one after the other; another takes its place if it dies.

    `cpu_priority` is its nice value, `io_priority` an I/O class of psutil's. It always ends with its trainer, copies
    always go through shared memory, and an abort always ends it at once: `is_daemon`, `cpu_shm_mode` and
    `sigterm_timeout` are accepted and change nothing.
    """

    def __init__(
        self,
        is_daemon: bool = True,
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(cpu_priority, io_priority)
        self.is_daemon, self.sigterm_timeout, self.cpu_shm_mode = is_daemon, sigterm_timeout, cpu_shm_mode

    def warm(self) -> None:
        """Start the process now."""
        self._worker()


def _raise(outcome: Outcome | None, failed: list[int], no_dist: bool, path: str) -> None:
    mine = outcome is not None and outcome.failed
    where = "" if no_dist or not agreement.distributed() else f" on {_ranks(failed)}"
    what = outcome.text if outcome is not None and mine else "see there for the reason"
    error = CheckpointError(f"a save in the background failed{where}: {what}. {_stays(path)}")
    if outcome is not None and mine and outcome.trace:
        error.add_note(f"in its worker:\n{outcome.trace}")
    raise error


def _stays(path: str) -> str:
    return f"{path} is what it was before." if path else "Nothing of it is finalized."


def sweep(timeout_s: float = 0.0) -> None:
    """Let go of workers that nobody holds any more once all is done that they were given; say what failed."""
    for saver in [one for one in SAVERS if one.abandoned and one.ours]:
        outcomes = [(running, running.look(timeout_s)) for running in saver.given]
        if timeout_s == 0.0 and any(outcome is None for _, outcome in outcomes):
            continue
        for running, found in outcomes:
            outcome = found or Outcome(f"it was not done within {timeout_s:g} s")
            if outcome.failed:
                say(f"a save in the background failed: {running.path} {outcome.text}")
            running.end(outcome)
        saver.end()
