"""Small helpers under NVRx's names: what its scripts and tests import from here."""

import contextlib
import gc
import importlib
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.nested import mapped
from everstep.clock import SYSTEM

fallback_logger = logging.getLogger(__name__)
_names: list[str] = []
_loggers: list[logging.Logger] = []
U = TypeVar("U")
V = TypeVar("V")


@contextlib.contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Generator[tuple[str, logging.Logger]]:
    """While this lasts, messages carry `name` behind those around it, and go to the innermost logger."""
    before = len(_names), len(_loggers)
    _names.extend([name] if name else [])
    _loggers.extend([current_logger] if current_logger else [])
    try:
        yield ".".join(_names), _loggers[-1] if _loggers else fallback_logger
    finally:
        del _names[before[0] :], _loggers[before[1] :]


@contextlib.contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Generator[None]:
    """Log how long the block took, in seconds, if that is `threshold` or more: with a threshold as a warning."""
    with logger_stack(name, logger) as (stacked, last):
        begun = SYSTEM.now()
        try:
            yield
        finally:
            took = SYSTEM.now() - begun
            usual = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            if took >= threshold:
                last.log(usual if level is None else level, "%s took %.4fs", stacked, took)


def debug_msg(msg: str) -> None:
    """Log a message for debugging, with the names around it."""
    with logger_stack(None, None) as (stacked, last):
        last.debug("%s %s", stacked, msg)


def preload_tensors(state_dict: Any, non_blocking: bool = True) -> Any:
    """Return the state with its tensors copied to the host; they are copies there too, so that no later write reaches
    them. Dicts, lists, tuples and dataclasses are walked, DTensors and ShardedTensors give copies of their shards.

    With `non_blocking` copies from a device may be under way when it returns: synchronize it before they are read.
    """
    return mapped(lambda value: copied(value, non_blocking=non_blocking), state_dict)


def copied(value: Any, *, non_blocking: bool = False) -> Any:
    """Return a copy on the host of a tensor of whatever kind; other values as they are."""
    if not isinstance(value, Tensor):
        return sharded_to_host(value, non_blocking=non_blocking)
    detached: Tensor = value.detach()
    if detached.device.type == "cpu" or isinstance(detached, DTensor):
        detached = detached.clone()
    return detached.to("cpu", non_blocking=non_blocking) if detached.device.type != "cpu" else detached


def sharded_to_host(value: Any, *, non_blocking: bool = False) -> Any:
    """Return a ShardedTensor's copy on the host, shard by shard, without communication; other values as they are."""
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    if not isinstance(value, module.ShardedTensor):
        return value
    return with_shards(value, [copied(shard.tensor, non_blocking=non_blocking) for shard in value.local_shards()])


def with_shards(value: Any, tensors: list[Tensor]) -> Any:
    """Return a ShardedTensor of the same metadata with these local shards. No communication."""
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    shards = [module.Shard(tensor, shard.metadata) for tensor, shard in zip(tensors, value.local_shards(), strict=True)]
    make = module.ShardedTensor._init_from_local_shards_and_global_metadata  # noqa: SLF001 - the one way without a collective
    return make(shards, value.metadata(), process_group=value._process_group)  # noqa: SLF001


@contextlib.contextmanager
def _disable_gc() -> Generator[None]:
    """While this lasts, no garbage is collected."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., None]:
    """Return `fn` without the collection of garbage while it runs."""

    def wrapped(state_dict: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_gc():
            fn(state_dict, *args, **kwargs)

    return wrapped


Differences = tuple[list[Any], list[Any], list[Any]]


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> Differences:
    """Return what two nested states differ in: paths of the left one alone, of the right one alone, and of values that
    differ, as (path, type, type). Tensors are compared by elements, wherever they are; NaN equals NaN nowhere.
    """
    if isinstance(x1, Mapping) and isinstance(x2, Mapping):
        return _of_mappings(x1, x2, prefix)
    if _is_row(x1) and _is_row(x2):
        return _of_rows(x1, x2, prefix)
    return [], [], [] if _equal(x1, x2) else [(prefix, type(x1), type(x2))]


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _of_mappings(x1: Mapping[Any, Any], x2: Mapping[Any, Any], prefix: tuple[Any, ...]) -> Differences:
    left = [(*prefix, key) for key in x1 if key not in x2]
    right = [(*prefix, key) for key in x2 if key not in x1]
    return _joined((left, right, []), [diff(x1[key], x2[key], (*prefix, key)) for key in x1 if key in x2])


def _of_rows(x1: Any, x2: Any, prefix: tuple[Any, ...]) -> Differences:
    left = [(*prefix, n) for n in range(len(x2), len(x1))]
    right = [(*prefix, n) for n in range(len(x1), len(x2))]
    return _joined((left, right, []), [diff(a, b, (*prefix, n)) for n, (a, b) in enumerate(zip(x1, x2, strict=False))])


def _joined(first: Differences, others: list[Differences]) -> Differences:
    for other in others:
        for mine, more in zip(first, other, strict=True):
            mine.extend(more)
    return first


def _equal(x1: Any, x2: Any) -> bool:
    if isinstance(x1, Tensor) and isinstance(x2, Tensor):
        return x1.shape == x2.shape and bool(torch.all(x1.cpu() == x2.cpu()))
    try:
        same = x1 == x2
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    except (RuntimeError, ValueError, TypeError):
        return False


def dict_list_map_outplace(f: Callable[[U], V], x: Any) -> Any:
    """Return dicts and lists anew with `f` of everything else in them."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)
