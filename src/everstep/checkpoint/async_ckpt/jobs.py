"""What a request becomes: an archive to be written, a call to be made in the worker, or one on a thread.

`prepared` decides, on the thread that saves; when it returns, tensors are copied and nothing of the request is read
again. What cannot be pickled at all (an object of the script's own classes, a lock) is done on a thread of this
process: it is done, but it shares the interpreter with training.
"""

import contextlib
import os
import pickle
import secrets
import threading
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.archive_file import temporary_name, write_archive
from everstep.checkpoint.async_ckpt.packing import Packed, memory_of, pack, records, ship
from everstep.checkpoint.async_ckpt.process import Outcome, Saver, told
from everstep.checkpoint.async_ckpt.region import Pool, Region
from everstep.checkpoint.async_ckpt.worker import archive_records
from everstep.telemetry import say

_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)


class ArchiveJob:
    """Packed states that become one file each. Calling it does it here; a worker does the same (CS-40)."""

    def __init__(self, files: Sequence[tuple[Packed, str]], pool: Pool) -> None:
        self.paths = [os.path.realpath(path) for _, path in files]  # of a link, what it leads to is replaced
        for path in self.paths:
            if os.path.exists(path) and not os.path.isfile(path):
                raise TypeError(f"{path} is there and is no file: a save replaces files alone. Give another path.")
        self.temporaries = [temporary_name(path, secrets.token_hex(8)) for path in self.paths]
        self._packed, self._pool = [packed for packed, _ in files], pool

    @property
    def path(self) -> str:
        """The first of its files."""
        return self.paths[0]

    def message(self) -> tuple[dict[str, Any], list[int]]:
        """See `Job.message`."""
        files = [
            {"path": path, "temporary": temporary, "parts": list(records(packed))}
            for packed, path, temporary in zip(self._packed, self.paths, self.temporaries, strict=True)
        ]
        fds = [fd for packed in self._packed for fd in (os.dup(packed.region.fd), memory_of(packed.inline))]
        return {"kind": "archives", "files": files}, fds

    def __call__(self) -> None:
        """See `Job.__call__`."""
        for packed, path, temporary in zip(self._packed, self.paths, self.temporaries, strict=True):
            with memoryview(packed.region.map) as region, memoryview(packed.inline) as inline:
                write_archive(path, temporary, archive_records(list(records(packed)), region, inline))

    def done(self, outcome: Outcome) -> None:
        """See `Job.done`."""
        while self._packed:
            self._pool.give(self._packed.pop().region)
        for temporary in self.temporaries if outcome.failed else ():
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def run(self) -> None:
        """Do it here, and see to its end."""
        outcome = Outcome("it was not written")
        try:
            self()
            outcome = Outcome()
        finally:
            self.done(outcome)


@dataclass(frozen=True)
class WriteArchive:
    """The `async_fn` of `TorchAsyncCheckpoint`: writes a state to `path` as `torch.save` would, whole or not at all."""

    path: str
    pickle_module: Any = pickle
    pickle_protocol: int = 2
    byteorder: bool = True

    def __call__(self, state: Any) -> None:
        """Do it here."""
        pool = Pool()
        self.job(pool, state).run()
        pool.clear()

    def job(self, pool: Pool, state: Any) -> ArchiveJob:
        """Return it as a job; the state is copied. Raises TypeError where the path names no file."""
        packed = pack(state, pool, self.pickle_module, self.pickle_protocol, byteorder=self.byteorder)
        try:
            return ArchiveJob([(packed, self.path)], pool)
        except BaseException:
            pool.give(packed.region)
            raise


class WriteArchives:
    """The `async_fn` of a local checkpoint: writes what was packed already. To be called once, or made a job once."""

    def __init__(self, files: Sequence[tuple[Packed, str]], pool: Pool) -> None:
        self._job = ArchiveJob(files, pool)

    def __call__(self) -> None:
        """Do it here."""
        self._job.run()

    def job(self, pool: Pool) -> ArchiveJob:
        """Return it as a job."""
        del pool  # it has its own
        return self._job


class CallJob:
    """A function and its arguments, pickled, with their tensors in a region."""

    path = ""

    def __init__(self, call: tuple[Any, ...], pool: Pool) -> None:
        self._pool = pool
        self._region: Region
        self._region, self._content = ship(call, pool)

    def message(self) -> tuple[dict[str, Any], list[int]]:
        """See `Job.message`."""
        return {"kind": "call"}, [os.dup(self._region.fd), memory_of(self._content)]

    def __call__(self) -> None:
        """See `Job.__call__`. A call that was shipped is made where it was shipped to."""
        raise NotImplementedError

    def done(self, outcome: Outcome) -> None:
        """See `Job.done`."""
        del outcome
        self._pool.give(self._region)


class ThreadJob:
    """A call on a thread of this process."""

    path = ""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self._call: tuple[Any, ...] = call
        self.outcome: Outcome | None = None
        self._thread = threading.Thread(target=self, name="everstep-save", daemon=True)
        self._thread.start()

    def message(self) -> tuple[dict[str, Any], list[int]]:
        """See `Job.message`. It is sent nowhere."""
        raise NotImplementedError

    def __call__(self) -> None:
        """See `Job.__call__`."""
        function, args, kwargs = self._call
        try:
            function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - it is the call's end
            self.outcome = Outcome(told(error), "".join(traceback.format_exception(error)))
        else:
            self.outcome = Outcome()

    def look(self, timeout_s: float | None) -> Outcome | None:
        """Return its end, if it has come within `timeout_s`."""
        self._thread.join(timeout_s)
        return self.outcome

    def done(self, outcome: Outcome) -> None:
        """See `Job.done`."""
        del outcome
        self._call = ()


def prepared(request: Any, pool: Pool) -> "ArchiveJob | CallJob | ThreadJob | None":
    """Return what is to be done, its tensors copied; None where that is nothing."""
    function, kwargs = request.async_fn, dict(request.async_fn_kwargs or {})
    if function is None:
        return None
    args = _arguments(request)
    if isinstance(function, WriteArchive | WriteArchives):
        return function.job(pool, *args)
    _synchronize()
    try:
        return CallJob((function, args, kwargs), pool)
    except _UNPICKLABLE as error:
        say(f"a save in the background runs on a thread of the trainer, since it cannot be sent to a process: {error}")
        return ThreadJob((function, _copied(args), _copied(kwargs)))


def _arguments(request: Any) -> list[Any]:
    """Return the arguments, preloaded; a preload that only moves tensors is left out, since they are copied anyway."""
    moving, args = getattr(request.preload_fn, "func", None), list(request.async_fn_args)
    if moving is not None and getattr(moving, "__qualname__", "") == _MOVES:
        args[1] = request.preload_fn.args[0]
        return args
    preloaded: list[Any] = request.arguments()
    return preloaded


_MOVES = "FileSystemWriterAsync.preload_tensors"


def _synchronize() -> None:
    """What a preload has begun on a device has ended."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _copied(value: Any) -> Any:
    """Return containers and tensors anew; other objects as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_copied(one) for one in value)
    return value


class Running:
    """A job under way."""

    _next = 0

    def __init__(self, job: "ArchiveJob | CallJob | ThreadJob | None", caller: Any) -> None:
        self._job = job
        self._saver: Saver | None = None
        self._outcome: Outcome | None = Outcome() if job is None else None
        Running._next += 1
        self._idx = Running._next
        self.path = job.path if job is not None else ""
        if self.path:
            _writing[self.path] = caller

    def begin(self, saver: Saver) -> None:
        """Give it to a worker."""
        assert self._job is not None
        self._saver = saver
        saver.give(self._idx, self._job, self)

    def look(self, timeout_s: float | None) -> Outcome | None:
        """Return its end, if it has come within `timeout_s` (None: whenever it comes)."""
        if self._outcome is None and isinstance(self._job, ThreadJob):
            self._outcome = self._job.look(timeout_s)
        elif self._outcome is None and self._saver is not None:
            self._outcome = self._saver.outcome(self._idx, timeout_s)
        return self._outcome

    def end(self, outcome: Outcome) -> None:
        """Give back what it holds."""
        self._outcome = outcome
        if self._saver is not None:
            self._saver.forget(self._idx)
        if self._job is not None:
            self._job.done(outcome)
            self._job = None


_writing: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
"""Who writes a file: two savers of one file at the same time would leave the older state under its name."""


def writer_of(path: str) -> Any:
    """Return the caller that was last given that file to write, if it is still there."""
    return _writing.get(path)
