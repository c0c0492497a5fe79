"""Process-global state that a function can leave changed, as a table: what it is called, how to read it, how to set it.

Most of it belongs to context managers written in Python, which an exception between two bytecodes can leave half-way
(E19: autocast stayed on in 22 % of interrupts aimed at it); a rank that trains on in bf16 does not look ill.

Rule 1: a name that this version of torch does not have is skipped and listed (`reset.missing`), never an error.
Rule 2: reading an item changes nothing. Setting one may touch another (matmul precision sets two backends'): so the
        table is gone through twice.
"""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_C: Any = torch._C  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
Read = Callable[[], Any]
Write = Callable[[Any], object]


class Absent(Exception):
    """This version of torch (or this process) has no such state."""


UNKNOWN: Any = object()


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of state: its value in a fresh process is what it was at the first entry.

    `fresh` is that value where the state was absent then (its module not imported yet), or, with `always`, in any case.
    """

    name: str
    read: Read
    write: Write
    fresh: Any = UNKNOWN
    always: bool = False


def find(root: object, path: str) -> Any:
    """Return `root.a.b.c`; raises Absent."""
    for name in path.split("."):
        try:
            root = getattr(root, name)
        except AttributeError:
            raise Absent(path) from None
    return root


def loaded(module: str) -> Any:
    """Return a module if it has been imported already; raises Absent."""
    found = sys.modules.get(module)
    if found is None:
        raise Absent(module)
    return found


def items() -> Iterator[Item]:
    """Return the table, in the order in which it is restored."""
    yield from _modes()
    yield from _autocast()
    yield from _numerics()
    yield from _autograd()
    yield from _interpreter()


def _pair(name: str, getter: str, setter: str, root: object = torch) -> Item:
    """An item with a function each to get and to set it; a tuple is spread over the arguments."""

    def write(value: Any) -> object:
        return find(root, setter)(*value) if isinstance(value, tuple) else find(root, setter)(value)

    return Item(name, lambda: find(root, getter)(), write)


def _attribute(name: str, module: str, path: str, fresh: Any) -> Item:
    """An item that is an attribute of a module (or of a class in it) which may not be imported yet."""
    owner, _, attribute = path.rpartition(".")

    def holder() -> Any:
        return find(loaded(module), owner) if owner else loaded(module)

    return Item(name, lambda: find(holder(), attribute), lambda value: setattr(holder(), attribute, value), fresh)


def _down_to(depth: Read, pop: Callable[[], object]) -> Write:
    """Set a stack by taking off what was left on it; what was taken off by the function is not put back."""

    def write(target: int) -> None:
        for _ in range(int(depth()) - int(target)):
            pop()

    return write


# Modes: what sits between a call and its kernel


def _modes() -> Iterator[Item]:
    functions: Read = lambda: find(_C, "_len_torch_function_stack")()  # noqa: E731
    dispatches: Read = lambda: find(_C, "_len_torch_dispatch_stack")()  # noqa: E731
    transforms: Read = lambda: find(_C, "_functorch.get_dynamic_layer_stack_depth")()  # noqa: E731
    pop = "_functorch.pop_dynamic_layer_stack_and_undo_to_depth"
    yield Item("transform stack", transforms, lambda depth: find(_C, pop)(depth))
    yield Item("function mode stack", functions, _down_to(functions, lambda: find(_C, "_pop_torch_function_stack")()))
    yield Item("dispatch mode stack", dispatches, _down_to(dispatches, _pop_dispatch))
    yield Item("function override", lambda: find(_C, "_is_torch_function_enabled")(), _set_function_override)
    yield Item("default device", _default_device, _set_default_device)
    yield _attribute("current device mode", "torch.utils._device", "CURRENT_DEVICE", None)


def _pop_dispatch() -> None:
    """Take off a user's mode, or else torch's own three (functional, proxy, fake), which have places of their own."""
    try:
        find(_C, "_pop_torch_dispatch_stack")(None)
    except (RuntimeError, AssertionError):
        for name in ("FUNCTIONAL", "PROXY", "FAKE"):
            find(_C, "_unset_dispatch_mode")(find(_C, f"_TorchDispatchModeKey.{name}"))


def _default_device() -> Any:
    holder = find(torch, "_GLOBAL_DEVICE_CONTEXT")
    mode = getattr(holder, "device_context", None)
    return None if mode is None else str(mode.device)


def _set_default_device(value: str | None) -> None:
    torch.set_default_device(value)


def _set_function_override(value: bool) -> None:
    state = find(_C, "_TorchFunctionState.ENABLED" if value else "_TorchFunctionState.DISABLED")
    find(_C, "_set_torch_function_state")(state)


# Autocast


def _autocast() -> Iterator[Item]:
    for device in _autocast_devices():
        yield Item(
            f"autocast {device}",
            partial(_get_autocast, device),
            partial(_set_autocast, device),
        )
    yield _pair("autocast cache", "is_autocast_cache_enabled", "set_autocast_cache_enabled")
    yield Item("autocast nesting", _nesting, _down_to(_nesting, torch.autocast_decrement_nesting))


def _autocast_devices() -> tuple[str, ...]:
    supported = getattr(_C, "_autocast_supported_devices", None)
    known: list[str] = list(supported()) if supported is not None else ["cpu", "cuda"]
    return tuple(device for device in known if device in ("cpu", "cuda"))


def _get_autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, value[0])
    torch.set_autocast_dtype(device, value[1])
    torch.clear_autocast_cache()


def _nesting() -> int:
    torch.autocast_increment_nesting()
    level: int = torch.autocast_decrement_nesting()
    return level


# What decides the bits of a result


def _numerics() -> Iterator[Item]:
    yield _pair("default dtype", "get_default_dtype", "set_default_dtype")
    yield _pair("threads", "get_num_threads", "set_num_threads")
    yield Item("deterministic algorithms", _deterministic, _set_deterministic)
    yield _pair("fill uninitialized", "_get_deterministic_fill_uninitialized_memory", _SET_FILL, _C)
    for kind in ("enabled", "benchmark", "deterministic"):
        yield _pair(f"cudnn {kind}", f"_get_cudnn_{kind}", f"_set_cudnn_{kind}", _C)
    yield _pair("mkldnn", "_get_mkldnn_enabled", "_set_mkldnn_enabled", _C)
    yield _pair("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash", _C)
    yield _pair("memory efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient", _C)
    yield _pair("math attention", "_get_math_sdp_enabled", "_set_sdp_use_math", _C)
    yield _pair("cudnn attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", _C)
    for kind in ("fp16", "bf16"):
        word = f"cublas_allow_{kind}_reduced_precision_reduction"
        yield _pair(f"{kind} reduction", f"_get_{word}", f"_set_{word}", _C)
    yield from _precisions()
    yield _pair("matmul precision", "get_float32_matmul_precision", "set_float32_matmul_precision")


_SET_FILL = "_set_deterministic_fill_uninitialized_memory"


_OPERATIONS = ("matmul", "conv", "rnn")


def _precisions() -> Iterator[Item]:
    """TF32 and its kin: one setting for each backend and operation since 2.9, two flags before."""
    if not hasattr(_C, "_get_fp32_precision_getter"):
        yield _pair("cudnn tf32", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32", _C)
        yield _pair("cublas tf32", "_get_cublas_allow_tf32", "_set_cublas_allow_tf32", _C)
        return
    for backend, operation in [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", *_OPERATIONS))]:
        yield Item(
            f"precision {backend} {operation}",
            partial(_get_precision, backend, operation),
            partial(_set_precision, backend, operation),
        )


def _get_precision(backend: str, operation: str) -> Any:
    return find(_C, "_get_fp32_precision_getter")(backend, operation)


def _set_precision(backend: str, operation: str, value: Any) -> None:
    find(_C, "_set_fp32_precision_setter")(backend, operation, value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


# Autograd


def _autograd() -> Iterator[Item]:
    yield Item("inference mode", torch.is_inference_mode_enabled, _set_inference_mode)
    yield _pair("grad mode", "is_grad_enabled", "_C._set_grad_enabled")
    yield _pair("forward grad", "_is_fwd_grad_enabled", "_set_fwd_grad_enabled", _C)
    yield _pair("autograd threads", "_is_multithreading_enabled", "_set_multithreading_enabled", _C)
    yield _pair("view replay", "_is_view_replay_enabled", "_set_view_replay_enabled", _C)
    yield Item("anomaly mode", _anomaly, lambda value: torch.set_anomaly_enabled(*value))
    top, pop = "_autograd._top_saved_tensors_default_hooks", "_autograd._pop_saved_tensors_default_hooks"
    saved: Read = lambda: find(_C, top)(False) is not None  # noqa: E731
    yield Item("saved tensor hooks", saved, _down_to(saved, lambda: find(_C, pop)()))
    yield _attribute("parametrize cache", "torch.nn.utils.parametrize", "_cache_enabled", 0)
    ddp = "torch.nn.parallel.distributed"
    yield _attribute("active DDP module", ddp, "DistributedDataParallel._active_ddp_module", None)


_kept_guards: list[Any] = []
"""Inference mode is set by an object that lives; those that mend it live for ever (a few bytes, hardly ever)."""


def _set_inference_mode(value: bool) -> None:
    _kept_guards.append(find(_C, "_InferenceMode")(value))


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


# The interpreter


def _interpreter() -> Iterator[Item]:
    yield Item("excepthook", lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook))
    yield Item("thread excepthook", lambda: threading.excepthook, lambda h: setattr(threading, "excepthook", h))
    yield Item("unraisablehook", lambda: sys.unraisablehook, lambda hook: setattr(sys, "unraisablehook", hook))
    yield Item("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield Item("working directory", os.getcwd, os.chdir)
    yield Item("cuda device", _cuda_device, lambda device: torch.cuda.set_device(device))


def _cuda_device() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        raise Absent("cuda")
    return int(torch.cuda.current_device())
