"""`Abort`: what ends the waits of the function that is to be left.

Called from a thread that is not the function's, within a limit of time (W18); whatever it does, the wrapper then severs
what still connects this rank (gloo's sockets, the generation's store), so that no wait is left (W2).
"""

import abc
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from everstep import environ, resources
from everstep.inprocess import nccl
from everstep.inprocess.state import FrozenState
from everstep.telemetry import say

ABORT_S = 3.0
_RECORDER_SIZES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")


class Abort(abc.ABC):
    """Ends something that the function may wait in."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return `state`. What it raises is told, and keeps nothing else from being ended."""
        ...


class AbortTorchDistributed(Abort):
    """Ends what this process communicates with: NCCL groups by their own abort, all at the same time; gloo groups by
    severing their sockets. Groups are destroyed afterwards, by the wrapper, on the function's own thread.

    `torch_fr_trace_path`: a folder for NCCL's Flight Recorder (else NVRX_FR_TRACE_PATH); where torch records, what it
    has recorded is written to `iter_<n>/rank_<r>` there, before anything is aborted.
    """

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path

    def __call__(self, state: FrozenState) -> FrozenState:
        """See `Abort.__call__`."""
        if dist.is_available() and dist.is_initialized():
            folder = self.torch_fr_trace_path or environ.get("NVRX_FR_TRACE_PATH")
            if folder and any(int(environ.get(name, "0") or 0) > 0 for name in _RECORDER_SIZES):
                _dump(Path(folder) / f"iter_{state.iteration}", state.rank or 0)
        if _severing:
            _severing[-1]()
        else:
            self.shutdown_all_process_group_backends()
        return state

    @staticmethod
    def shutdown_all_process_group_backends() -> None:
        """Abort the NCCL backends of all groups at the same time; name those that are late or fail."""
        ended = resources.together({name: _within(act) for name, act in nccl.aborts().items()}, ABORT_S)
        for what in (*ended.late, *ended.failed):
            say(f"abort: {what}")

    @staticmethod
    def shutdown_process_group_backend(group: Any, device: Any) -> None:
        """Abort the backend of one group for one device, if it can be aborted."""
        backend = group._get_backend(device)  # noqa: SLF001 - torch has no public name for it
        end = getattr(backend, "abort", None) or getattr(backend, "_shutdown", None)
        if end is not None:
            end()


class AbortTransformerEngine(Abort):
    """Lets go of Transformer Engine's user buffers and FP8 state, where it has been imported.

    List it before `AbortTorchDistributed` in a Compose: what is listed last runs first, and groups must be aborted
    before the buffers that they use go.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """See `Abort.__call__`."""
        if "transformer_engine" in sys.modules:
            base = importlib.import_module("transformer_engine.pytorch.module.base")
            base.destroy_ub()
            with contextlib.suppress(ImportError, AttributeError):
                importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager.reset()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends what writes checkpoints in the background of this process: all that registered as `checkpoint`."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """See `Abort.__call__`."""
        ended = resources.REGISTRY.end(ABORT_S, ("checkpoint",))
        for what in (*ended.late, *ended.failed):
            say(f"abort: {what}")
        return state


_severing: list[Callable[[], None]] = []
_dumping = threading.Lock()


@contextlib.contextmanager
def severing(sever: Callable[[], None]) -> Generator[None]:
    """While this lasts, `AbortTorchDistributed` has the wrapper's own engine end the communication."""
    _severing.append(sever)
    try:
        yield
    finally:
        _severing.remove(sever)


def _within(act: Callable[[], object]) -> resources.Ender:
    def end(deadline_s: float) -> None:
        del deadline_s  # the caller waits no longer than that
        act()

    return end


def _dump(folder: Path, rank: int) -> None:
    """Write the Flight Recorder's trace, without stacks: collecting them wants the interpreter lock."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace", None)
    if dump is None:
        return
    try:
        with _dumping:
            trace = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank_{rank}").write_bytes(trace)
    except Exception as error:  # noqa: BLE001 - a trace is not worth a recovery
        say(f"NCCL's Flight Recorder was not written to {folder}: {type(error).__name__}: {error}")
