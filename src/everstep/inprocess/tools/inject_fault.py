"""Faults on purpose, by a seed that all ranks share: NVRx's `inject_fault`.

Every rank calls `inject_fault` with the same arguments; the seed chooses which ranks, which fault and when. For faults
at a step or in a phase use `everstep run --fault-…`.
"""

import contextlib
import ctypes
import enum
import importlib
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from everstep import environ
from everstep.clock import SYSTEM
from everstep.inprocess.monitor_thread import async_raise as async_raise

Callback = Callable[[], Any] | None


class Fault(enum.Enum):
    """What can be injected."""

    GPU_ERROR = enum.auto()  # an illegal access on the device
    GPU_SLEEP = enum.auto()  # a kernel that does not end
    WORKLOAD_EXC = enum.auto()  # raised by `maybe_raise_workload_exception` in the loop
    ASYNC_EXC = enum.auto()  # raised in the main thread from outside
    SIGNAL_EXC = enum.auto()  # raised by a handler of SIGTERM
    OS_ABORT = enum.auto()
    LOCK_GIL = enum.auto()  # holds the interpreter lock for ever
    SEGFAULT = enum.auto()
    SIGINT = enum.auto()
    SIGKILL = enum.auto()
    SIGTERM = enum.auto()
    SIGSTOP = enum.auto()


class InjectedException(Exception):
    """Raised on purpose."""


Handler = Callable[[float, Callback], object]
_handlers: dict[Fault | str, Handler] = {}
_workload: list[InjectedException] = []
_SLEEP_CYCLES = 1 << 62


def register_fault(fault_name_or_enum: str | Fault, handler: Handler) -> None:
    """Have `handler(delay, callback)` called for a fault; a name of your own is as good as a member (W54)."""
    _handlers[fault_name_or_enum] = handler


def dispatch_fault_injection(fault: Fault | str, delay: float, callback: Callback) -> None:
    """Inject `fault` after `delay` seconds. ValueError for one that nobody registered."""
    if fault in _handlers:
        _handlers[fault](delay, callback)
        return
    if not isinstance(fault, Fault):
        known = ", ".join([*Fault.__members__, *map(str, _handlers)])
        raise ValueError(f"{fault!r} is no fault that is known here; there are {known}; register_fault adds others")
    _dispatch(fault, delay, callback)


def _dispatch(fault: Fault, delay: float, callback: Callback) -> None:
    if fault.name in signal.Signals.__members__:
        send_signal(os.getpid(), signal.Signals[fault.name], delay, callback)
    elif fault is Fault.SIGNAL_EXC:
        signal.signal(signal.SIGTERM, termination_signal_handler)
        send_signal(os.getpid(), signal.SIGTERM, delay, callback)
    elif fault is Fault.ASYNC_EXC:
        _later(async_raise_exception, threading.main_thread().ident or 0, delay, callback)
    elif fault is Fault.GPU_SLEEP:
        _later(gpu_sleep, delay, None, callback)
    else:
        acts: dict[Fault, Callable[[float, Callback], object]] = {
            Fault.WORKLOAD_EXC: workload_exception,
            Fault.GPU_ERROR: raise_gpu_error,
            Fault.OS_ABORT: abort,
            Fault.LOCK_GIL: lock_gil,
            Fault.SEGFAULT: segfault,
        }
        _later(acts[fault], delay, callback)


def _later(act: Callable[..., object], *arguments: Any) -> None:
    threading.Thread(target=act, args=arguments, name="everstep-fault", daemon=True).start()


def _wait(delay: float, callback: Callback) -> None:
    SYSTEM.sleep(delay)
    if callback is not None:
        callback()


def termination_signal_handler(signum: int, frame: object) -> None:
    """Raise in the main thread."""
    raise InjectedException(f"raised by the handler of {signal.Signals(signum).name}")


def workload_exception(delay: float, callback: Callback) -> None:
    """Have the next `maybe_raise_workload_exception` raise."""
    _wait(delay, callback)
    _workload.append(InjectedException("raised in the loop"))


def maybe_raise_workload_exception() -> None:
    """Raise what is due. For the training loop."""
    if _workload:
        raise _workload.pop()


def clear_workload_exception() -> None:
    """Forget what is due."""
    _workload.clear()


def async_raise_exception(tid: int, delay: float, callback: Callback) -> None:
    """Raise in thread `tid` from outside."""
    _wait(delay, callback)
    async_raise(tid, InjectedException)


def raise_gpu_error(delay: float, callback: Callback) -> None:
    """Make the device fail an assertion: its context is lost."""
    _wait(delay, callback)
    torch: Any = importlib.import_module("torch")
    values = torch.ones(1, device="cuda")
    values[torch.full((1,), 2**40, device="cuda", dtype=torch.int64)] = 0
    torch.cuda.synchronize()


def gpu_sleep(delay: float, device: int | None, callback: Callback) -> None:
    """Occupy the device with a kernel that does not end."""
    _wait(delay, callback)
    torch: Any = importlib.import_module("torch")
    with torch.cuda.device(device):
        torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - torch's own test helper
        torch.cuda.synchronize()


def lock_gil(delay: float, callback: Callback) -> None:
    """Hold the interpreter lock: a pattern that backtracks without end."""
    _wait(delay, callback)
    re.fullmatch(r"(a+)+b", "a" * 64)


def segfault(delay: float, callback: Callback) -> None:
    """Read address 0."""
    _wait(delay, callback)
    ctypes.string_at(0)


def abort(delay: float, callback: Callback) -> None:
    """End as C's `abort` does."""
    _wait(delay, callback)
    os.abort()


def send_signal(pid: int, signal: int, delay: float, callback: Callback) -> None:
    """Send a signal from a process of its own, so that it comes from outside. The child is reaped."""

    def send() -> None:
        _wait(delay, callback)
        arguments = [sys.executable, "-I", "-S", "-c", f"import os; os.kill({pid}, {int(signal)})"]
        with contextlib.suppress(ChildProcessError):
            os.waitpid(os.posix_spawn(arguments[0], arguments, environ.snapshot()), 0)

    _later(send)


def inject_fault(
    faults: tuple[Fault, ...],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callable[[], Any] | None = None,
) -> None:
    """Choose, by `seed`, how many ranks from `keep_alive` on are hurt, which, by what, and after how many seconds.

    A pair is a range to draw from. `callback` is called on a rank that is hurt, right before it is.
    """
    where = environ.placement()
    draw = random.Random(seed)
    count = num_faults if isinstance(num_faults, int) else draw.randint(*num_faults)
    candidates = range(keep_alive, where.world_size)
    if count > len(candidates):
        raise ValueError(
            f"inject_fault: {count} faults on ranks {keep_alive} to {where.world_size - 1}, which are fewer; lower "
            "num_faults or keep_alive"
        )
    chosen = draw.sample(candidates, count)
    fault = draw.choice(faults)
    after = delay if isinstance(delay, int | float) else draw.uniform(*delay)
    if where.rank in chosen:
        dispatch_fault_injection(fault, after, callback)
