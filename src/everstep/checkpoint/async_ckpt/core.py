"""A queue of calls in the background, under NVRx's names: `AsyncCallsQueue`, `AsyncRequest` and the two callers.

    queue.schedule_async_request(AsyncRequest(save_fn, args, [finalize_fn], preload_fn=preload_fn))
    queue.maybe_finalize_async_calls(blocking=False, no_dist=False)      now and then, on all ranks
    queue.close()

Rule 1: a queue shares nothing with another (CS-39), and each has one worker's process at most (W53).
Rule 2: what was scheduled is finished although nobody asks again: at the interpreter's end its queues are, and what
failed is told on stderr (W51, CS-37).
What a call is and how it fails: callers.py.
"""

import atexit
import weakref
from collections import deque
from typing import Any, NamedTuple

from everstep import resources
from everstep.checkpoint.async_ckpt import agreement
from everstep.checkpoint.async_ckpt.callers import AsyncCaller as AsyncCaller
from everstep.checkpoint.async_ckpt.callers import AsyncRequest as AsyncRequest
from everstep.checkpoint.async_ckpt.callers import PersistentAsyncCaller as PersistentAsyncCaller
from everstep.checkpoint.async_ckpt.callers import ProcessCaller, sweep
from everstep.checkpoint.async_ckpt.callers import TemporalAsyncCaller as TemporalAsyncCaller
from everstep.errors import CheckpointError
from everstep.telemetry import say

EXIT_S = 600.0
"""How long the interpreter's end waits for what is being written."""
EXIT_AGREE_S = 30.0
"""How long it waits there for the other ranks."""


class _ActiveAsyncRequest(NamedTuple):
    idx: int
    async_caller: ProcessCaller
    async_request: AsyncRequest


class AsyncCallsQueue:
    """Calls in the background, in order: `schedule_async_request`, then now and then `maybe_finalize_async_calls`.

    `persistent` has one process make all calls, else there is one for each. The other parameters are those of
    `PersistentAsyncCaller`. Used on one thread; `close(abort=True)` on any.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        self.async_calls: deque[_ActiveAsyncRequest] = deque()
        self.call_idx = -1
        self.persistent = persistent
        self.persistent_caller: PersistentAsyncCaller | None = None
        self._settings: Any = (is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        _instances.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start the process that the next persistent queue will use. It needs 0.1 s, and no call waits for it."""
        if not _warm:
            _warm.append(PersistentAsyncCaller(is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode))
            _warm[0].rank = rank
            _warm[0].warm()

    @classmethod
    def get_instances(cls) -> list["AsyncCallsQueue"]:
        """Return the queues of this process."""
        return list(_instances)

    def _get_async_caller(self) -> ProcessCaller:
        if not self.persistent:
            caller = TemporalAsyncCaller(*self._settings[1:3])
            caller.owner = self
            return caller
        if self.persistent_caller is None:
            self.persistent_caller = _warm.pop() if _warm else PersistentAsyncCaller(*self._settings)
            self.persistent_caller.owner = self
        return self.persistent_caller

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin a call; return its number, counted from 0. When it returns, all tensors of the request are copied.

        All ranks schedule the same calls. Raises MemoryShortage where the copy does not fit.
        """
        caller = self._get_async_caller()
        request = AsyncRequest(**async_request._asdict())._replace(is_frozen=True, call_idx=self.call_idx + 1)
        caller.schedule_async_call(request._replace(finalize_fns=[]))
        self.call_idx += 1
        self.async_calls.append(_ActiveAsyncRequest(self.call_idx, caller, request))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the calls that are done, oldest first, all of them with `blocking`; return their numbers.

        All ranks together, unless `no_dist`. Raises CheckpointError for one that failed; those behind it stay.
        """
        finalized: list[int] = []
        while self.async_calls:
            head = self.async_calls[0]
            try:
                over = head.async_caller.is_current_async_call_done(blocking, no_dist)
            except CheckpointError:
                self._drop(head)
                raise
            if not over:
                break
            self._drop(head)
            finalized.append(head.async_request.execute_finalize_fns(validate_matching_call_idx=not no_dist))
        return finalized

    def _drop(self, head: _ActiveAsyncRequest) -> None:
        if self.async_calls and self.async_calls[0] is head:  # an abort on another thread may have been faster
            self.async_calls.popleft()

    def get_num_unfinalized_calls(self) -> int:
        """Return how many calls are not finalized."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all calls, on all ranks together, and let the worker go; with `abort` drop them and end it now.

        Raises CheckpointError, after all is done, for the first call that failed. It may be used again.
        """
        self.finish(no_dist=False, abort=abort)

    def finish(self, *, no_dist: bool, abort: bool = False) -> None:
        """Do what `close` does, with or without the other ranks."""
        first: BaseException | None = None
        while self.async_calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True, no_dist=no_dist)
            except Exception as error:  # noqa: BLE001 - the others are seen to their end first
                first = first or error
        callers = {id(one.async_caller): one.async_caller for one in [*self.async_calls]}
        self.async_calls.clear()
        if self.persistent_caller is not None:
            callers[id(self.persistent_caller)] = self.persistent_caller
        for caller in callers.values():
            caller.close(abort=abort)
        if first is not None:
            raise first

    def at_exit(self) -> None:
        """See rule 4. Never raises, and waits no longer than it says."""
        try:
            for active in list(self.async_calls):
                if not active.async_caller.settle(EXIT_S):
                    raise CheckpointError(f"call {active.idx} was not done within {EXIT_S:g} s; it is given up")
            alone = not agreement.distributed()
            with agreement.patience(EXIT_AGREE_S):
                self.finish(no_dist=alone)
        except BaseException as error:  # noqa: BLE001 - the interpreter ends; this is the last that is heard of it
            say(f"at the end of the process, a save in the background was lost: {error}")
            self.finish(no_dist=True, abort=True)


_warm: list[PersistentAsyncCaller] = []
"""One that the next persistent queue will use."""
_instances: "weakref.WeakSet[AsyncCallsQueue]" = weakref.WeakSet()


def abort_nvrx_checkpoint() -> None:
    """End every save in the background of this process, now. Any thread; the queues may be used again."""
    for queue in list(_instances):
        queue.close(abort=True)


@atexit.register
def _at_exit() -> None:
    for queue in list(_instances):
        queue.at_exit()
    sweep(EXIT_S)
    while _warm:
        _warm.pop().close(abort=True)


resources.REGISTRY.register("checkpoint", "saves in the background", lambda _: abort_nvrx_checkpoint())
