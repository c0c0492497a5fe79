"""`BasicTensorAwareStateDict`: any nesting of the usual containers, tensors of any device, DTensors and ShardedTensors.

NVRx's wants every tensor on CUDA, in dicts and lists alone (W43, W50). The given state is never changed: containers are
made anew. Of a DTensor or a ShardedTensor the local shards are the tensors; its mesh, placements and metadata stay in
the hollow.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.local.base_state_dict import TensorAwareStateDict
from everstep.checkpoint.nested import leaves, mapped
from everstep.checkpoint.sharded import local_of
from everstep.checkpoint.utils import with_shards
from everstep.errors import UsageError


def nested_values(x: Any) -> Iterator[Any]:
    """Return what is in nested containers."""
    return leaves(x)


def dict_list_map_inplace(f: Any, x: Any) -> Any:
    """Apply `f` to everything in nested dicts and lists, in place; return `x`, or `f(x)` where it is neither."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


class TensorPlaceholder:
    """Stands for a tensor that was taken out: its device, shape, strides and dtype."""

    def __init__(self, ten: Tensor) -> None:
        self._device = ten.device.type
        self._shape, self._dtype = tuple(ten.shape), ten.dtype

    def init_tensor(self) -> Tensor:
        """Return an empty tensor like it, on the current device of its kind."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


class _Hollow:
    """Stands for a leaf of tensors: whatever it was, and a placeholder for each of its tensors."""

    def __init__(self, leaf: Any) -> None:
        self.kind = _kind(leaf)
        self.spec: Any = _spec(leaf) if self.kind == "dtensor" else _metadata(leaf) if self.kind == "sharded" else None
        self.parameter = type(leaf) is torch.nn.Parameter
        self.requires_grad = bool(getattr(leaf, "requires_grad", False))
        self.placeholders = [TensorPlaceholder(one) for one in parts(leaf)]

    def empty(self) -> list[Tensor]:
        """Return empty tensors for it."""
        return [one.init_tensor() for one in self.placeholders]

    def filled(self, tensors: list[Tensor]) -> Any:
        """Return the leaf with these tensors."""
        if self.kind == "dtensor":
            make: Any = DTensor
            return make(tensors[0], self.spec, requires_grad=self.requires_grad)
        if self.kind == "sharded":
            return _sharded(self.spec, tensors)
        if self.parameter:
            return torch.nn.Parameter(tensors[0], self.requires_grad)
        return tensors[0].requires_grad_() if self.requires_grad and tensors[0].is_floating_point() else tensors[0]


def _next(rest: Iterator[Tensor], hollow: _Hollow) -> list[Tensor]:
    return [next(rest) for _ in hollow.placeholders]


def _to_host(non_blocking: bool, one: Tensor) -> Tensor:
    host = one.detach().to("cpu", non_blocking=non_blocking)
    return host.clone() if one.device.type == "cpu" else host


def _back(devices: Iterator[str], non_blocking: bool, one: Tensor) -> Tensor:
    return one.to(next(devices), non_blocking=non_blocking)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, DTensor):
        return "dtensor"
    if isinstance(leaf, Tensor):
        return "tensor"
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    return "sharded" if isinstance(leaf, module.ShardedTensor) else ""


def _spec(leaf: Any) -> Any:
    return leaf._spec  # noqa: SLF001 - mesh, placements and strides together, as its constructor takes them


def _metadata(leaf: Any) -> Any:
    return leaf.metadata(), [shard.metadata for shard in leaf.local_shards()]


def _sharded(spec: Any, tensors: list[Tensor]) -> Any:
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    metadata, shards = spec
    made = [module.Shard(tensor, one) for tensor, one in zip(tensors, shards, strict=True)]
    return module.ShardedTensor._init_from_local_shards_and_global_metadata(made, metadata)  # noqa: SLF001 - without a collective


def parts(leaf: Any) -> list[Tensor]:
    """Return the tensors of a leaf: itself, or its local shards; none where it is something else."""
    kind = _kind(leaf)
    if kind == "sharded":
        return [shard.tensor.detach() for shard in leaf.local_shards()]
    return [local_of(leaf) if kind == "dtensor" else leaf.detach()] if kind else []


Move = Callable[[Tensor], Tensor]


def moved(leaf: Any, move: Move) -> Any:
    """Return a leaf with `move` of each of its tensors."""
    kind = _kind(leaf)
    if not kind:
        return leaf
    if kind == "sharded":
        return with_shards(leaf, [move(shard.tensor) for shard in leaf.local_shards()])
    return _Hollow(leaf).filled([move(one) for one in parts(leaf)])


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A state in dicts, lists, tuples, named tuples, deques and dataclasses. `state_dict` is it, as it is now."""

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices = [one.device.type for leaf in leaves(state_dict) for one in parts(leaf)]

    def pop_tensors(self) -> list[Tensor]:
        """See `TensorAwareStateDict.pop_tensors`. UsageError where they are out already."""
        self._must_be(hollow=False)
        found = list(self.tensors)
        self.state_dict = mapped(lambda leaf: _Hollow(leaf) if _kind(leaf) else leaf, self.state_dict)
        self._is_hollow = True
        return found

    @property
    def tensors(self) -> Iterator[Tensor]:
        """See `TensorAwareStateDict.tensors`."""
        self._must_be(hollow=False)
        return (one for leaf in leaves(self.state_dict) for one in parts(leaf))

    @property
    def is_hollow(self) -> bool:
        """See `TensorAwareStateDict.is_hollow`."""
        return self._is_hollow

    def insert_tensors(self, tensor_data: Iterable[Tensor]) -> None:
        """See `TensorAwareStateDict.insert_tensors`. UsageError where their number is another."""
        self._must_be(hollow=True)
        given = list(tensor_data)
        needed = sum(len(leaf.placeholders) for leaf in leaves(self.state_dict) if isinstance(leaf, _Hollow))
        if len(given) != needed:
            raise UsageError(f"this state holds {needed} tensors, and {len(given)} were given")
        rest = iter(given)
        self._fill(partial(_next, rest))

    def init_tensors(self) -> None:
        """See `TensorAwareStateDict.init_tensors`."""
        self._must_be(hollow=True)
        self._fill(_Hollow.empty)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """See `TensorAwareStateDict.copy_tensors_to_cpu`. Tensors of the host are copied too (CS-01)."""
        self._must_be(hollow=False)
        self._move(partial(_to_host, non_blocking))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """See `TensorAwareStateDict.restore_tensor_device`: the current device of each tensor's own kind."""
        self._must_be(hollow=False)
        devices = iter(self._devices)
        self._move(partial(_back, devices, non_blocking))

    def _move(self, move: Move) -> None:
        self.state_dict = mapped(lambda leaf: moved(leaf, move), self.state_dict)

    def _fill(self, tensors: Callable[[_Hollow], list[Tensor]]) -> None:
        self.state_dict = mapped(
            lambda leaf: leaf.filled(tensors(leaf)) if isinstance(leaf, _Hollow) else leaf, self.state_dict
        )
        self._is_hollow = False

    def _must_be(self, *, hollow: bool) -> None:
        if self._is_hollow is not hollow:
            raise UsageError("the tensors of this state are " + ("out" if self._is_hollow else "in") + " already")
