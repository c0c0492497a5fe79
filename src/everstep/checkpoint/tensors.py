"""Tensors, arrays and numpy scalars as leaves of a layout, and back; a value of any depth as a tree of them.

Reading never changes the live object: no hook runs, no collective is issued, nothing is gathered. What cannot be
kept exactly (sparse, quantised, nested, meta, tensor subclasses) is a TypeError that names its key.
"""

import functools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from everstep.checkpoint.core.layout import ITEM_BYTES, KINDS, Leaf, Node, Ref, Section, place, unsavable
from everstep.checkpoint.core.plain import Plain, plain

Payload = Callable[[Leaf], bytearray | memoryview]
"""Returns the writable bytes of a leaf."""

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A section with the live tensors whose bytes are its leaves', one for each leaf that is no alias.

    Two parts are equal where they are the same object: that is how it is known that nothing was walked anew.
    """

    section: Section
    sources: tuple[Tensor, ...]
    late: frozenset[int] = frozenset()  # of sources: written by an optimizer's step alone, so copied until then

    def placed(self, start: int) -> tuple["Part", int]:
        """Return this part with its leaves laid out from `start` on, and where they end."""
        if not self.section.leaves:
            return self, start
        leaves, end = place(self.section.leaves, start)
        return self.having(leaves), end

    def having(self, leaves: tuple[Leaf, ...]) -> "Part":
        """Return this part with its leaves in their places."""
        section = self.section
        placed = Section(section.name, section.tree, leaves, section.per_rank, section.text)
        return Part(placed, self.sources, self.late)


@dataclass(slots=True)
class Collector:
    """Gathers the leaves of one section. Two views of the same memory of the same shape become aliases."""

    name: str
    replicated: bool = False  # of plain tensors; a DTensor says it of itself
    per_rank: bool = False
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    sources: list[Tensor] = field(default_factory=list[Tensor])
    late: set[int] = field(default_factory=set[int])
    local: Tensor = field(default_factory=Tensor)  # this rank's part, detached, of the tensor that was added last
    _paths: dict[str, int] = field(default_factory=dict[str, int])
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict[tuple[Any, ...], str])

    def tensor(
        self,
        path: str,
        value: Tensor,
        *,
        replicated: bool | None = None,
        per_rank: bool | None = None,
        late: bool = False,
    ) -> Ref:
        """Add a tensor; `late` where nothing but an optimizer's step writes it."""
        check(value, path)
        path = self._unique(path)
        plain_replicated = self.replicated if replicated is None else replicated
        plain_own = self.per_rank if per_rank is None else per_rank
        local = self.local = local_of(value)
        dtensor = _sharding(value, path) if isinstance(value, DTensor) else {}
        facts: dict[str, Any] = {"replicated": plain_replicated, "per_rank": plain_own} | dtensor
        stride = () if local.is_contiguous() else tuple(local.stride())
        alias = self._alias(path, local)
        if late and alias is None:
            self.late.add(len(self.sources))
        return self._add(
            Leaf(
                path, dtype_name(local.dtype), tuple(local.shape), local.numel() * local.element_size(),
                stride=stride, device=local.device.type, alias_of=alias, **facts,
            ),
            local,
        )  # fmt: skip

    def array(self, path: str, value: Any, *, copied: bool = True) -> Ref:
        """Add a numpy array or scalar; its bytes as they are now, or, not `copied`, as they will be when it is read."""
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        if kind == "array" and type(value) is not np.ndarray:
            raise TypeError(unsavable(value, path))
        if value.dtype.hasobject or value.dtype.names is not None:
            raise TypeError(f"{path} is a numpy {kind} of dtype {value.dtype}, whose elements are objects or records. "
                            "Save its columns as arrays of numbers.")  # fmt: skip
        path = self._unique(path)
        raw = np.frombuffer(bytearray(value.tobytes()), np.uint8) if copied else value.view(np.uint8)
        source = torch.from_numpy(raw) if raw.size else torch.empty(0, dtype=torch.uint8)
        leaf = Leaf(path, value.dtype.str, tuple(value.shape), int(value.nbytes), kind=kind,
                    replicated=self.replicated, per_rank=self.per_rank)  # fmt: skip
        return self._add(leaf, source)

    def node(self, path: str, value: Any) -> Node:
        """Return `value` as a tree; its tensors and arrays become leaves."""
        if isinstance(value, Tensor):
            return self.tensor(path, value)
        if isinstance(value, np.ndarray | np.generic):
            return self.array(path, value)
        rebuild = _CONTAINERS.get(type(value))
        if rebuild is not None:
            return rebuild(value, lambda key, child: self.node(f"{path}/{key}", child))
        if type(value) not in KINDS:
            raise TypeError(unsavable(value, path))
        return value

    def part(self, tree: Node, *, per_rank: bool = False) -> Part:
        """Return what was gathered."""
        return Part(Section(self.name, tree, tuple(self.leaves), per_rank), tuple(self.sources), frozenset(self.late))

    def _add(self, leaf: Leaf, source: Tensor) -> Ref:
        self.leaves.append(leaf)
        if leaf.alias_of is None:
            self.sources.append(source)
        return Ref(len(self.leaves) - 1)

    def _unique(self, path: str) -> str:
        """Keys 1 and "1" make one path: the later leaf gets a number."""
        count = self._paths[path] = self._paths.get(path, 0) + 1
        return path if count == 1 else self._unique(f"{path}#{count}")

    def _alias(self, path: str, local: Tensor) -> str | None:
        if local.numel() == 0:
            return None
        key = (
            local.data_ptr(),
            local.device,
            local.dtype,
            local.shape,
            local.stride(),
            local.is_conj(),
            local.is_neg(),
        )
        first = self._seen.setdefault(key, path)
        return None if first == path else first


class Reading:
    """One section whose value is read anew at every step; what did not change is the part of the last time."""

    def __init__(self, name: str, *, replicated: bool = False, per_rank: bool = False) -> None:
        self._name, self._replicated, self._per_rank = name, replicated, per_rank
        self._known: Plain | None = None
        self._part: Part | None = None

    def part(self, value: Any) -> Part:
        """Return `value` as a part: in one call where it is plain, node by node where it holds tensors."""
        known, part = self._known, self._part
        if part is None or not part.section.leaves:  # what held a tensor the last time will hold one now
            made = plain(value, known)
            if made is not None:
                if part is None or made is not known:
                    part = Part(Section(self._name, made.value, (), self._per_rank, made.text), ())
                self._known, self._part = made, part
                return part
        collector = Collector(self._name, self._replicated, self._per_rank)
        self._known = None
        self._part = collector.part(collector.node(self._name, value), per_rank=self._per_rank)
        return self._part


def _names(values: list[Any]) -> bool:
    """A list of strings alone (an optimizer's parameters, hundreds of them at every step) is a tree as it is."""
    return all(type(value) is str for value in values)


Child = Callable[[Any, Any], Node]
_CONTAINERS: dict[type, Callable[[Any, Child], Node]] = {
    list: lambda v, child: v if _names(v) else [child(n, x) for n, x in enumerate(v)],
    tuple: lambda v, child: tuple(child(n, x) for n, x in enumerate(v)),
    dict: lambda v, child: {k: child(k, x) for k, x in v.items()},
    OrderedDict: lambda v, child: OrderedDict((k, child(k, x)) for k, x in v.items()),
    Counter: lambda v, child: Counter({k: child(k, x) for k, x in v.items()}),
    deque: lambda v, child: deque((child(n, x) for n, x in enumerate(v)), v.maxlen),
}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def local_of(value: Tensor) -> Tensor:
    """Return this rank's own part, detached: the same memory, no copy, no communication."""
    local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - to_local() goes through autograd
    return local.detach()


def check(value: Tensor, path: str) -> None:
    """Raise TypeError where a tensor cannot be kept exactly."""
    if isinstance(value, DTensor):
        check(local_of(value), path)
        return
    what = _unfit(value)
    if what:
        raise TypeError(f"{path} is {what}, which a snapshot cannot hold exactly. Keep it as a dense tensor, or leave "
                        "it out of the state and build it anew.")  # fmt: skip


def _unfit(value: Tensor) -> str:
    if type(value) not in _PLAIN:
        return f"a {type(value).__module__}.{type(value).__qualname__} (a subclass of Tensor)"
    if value.layout is not torch.strided or value.is_nested:
        return f"a tensor of layout {value.layout}"
    if value.device.type == "meta":
        return "a tensor on the meta device, without data"
    if value.is_quantized or dtype_name(value.dtype) not in ITEM_BYTES:
        return f"a tensor of dtype {value.dtype}"
    return ""


def _sharding(value: DTensor, path: str) -> dict[str, Any]:
    if any(isinstance(p, Partial) for p in value.placements):
        raise TypeError(f"{path} is a DTensor with a partial placement: its value is a sum over ranks that has not "
                        "been made. Redistribute it first.")  # fmt: skip
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    local = tuple(local_of(value).shape)
    if tuple(shape) != local:  # so also where a mesh of a former generation has crept in from a cache of DTensor
        raise TypeError(f"{path}: this rank's shard has the shape {local} where its placements {value.placements} say "
                        f"{tuple(shape)}. Such a layout is not supported.")  # fmt: skip
    whole = tuple(value.shape)
    return {
        "global_shape": None if whole == tuple(shape) else whole,
        "offsets": tuple(offsets) if any(offsets) else None,
        "placements": tuple(placement_name(p) for p in value.placements),
        "replicated": value.device_mesh.size() == 1 or all(isinstance(p, Replicate) for p in value.placements),
        "per_rank": False,
    }


def placement_name(placement: Any) -> str:
    """Return the short name of a DTensor placement: R, S(0), else its repr."""
    if isinstance(placement, Replicate):
        return "R"
    return f"S({placement.dim})" if type(placement) is Shard else repr(placement)


# Back from bytes.


def view(raw: Tensor, leaf: Leaf) -> Tensor:
    """Return the view of a leaf over `raw`, its bytes as a uint8 tensor."""
    dtype = getattr(torch, leaf.dtype) if leaf.kind == "tensor" else torch.uint8
    return raw.view(dtype).view(leaf.shape) if leaf.kind == "tensor" else raw


def stored(leaf: Leaf, payload: Payload) -> Tensor:
    """Return a view of a tensor leaf's stored bytes, row-major; it lives as long as the payload's memory does."""
    if leaf.nbytes == 0:
        return torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype))
    return view(torch.frombuffer(payload(leaf), dtype=torch.uint8), leaf)


def fresh(leaf: Leaf, payload: Payload, device: torch.device | None = None) -> Tensor:
    """Return a new tensor with the leaf's bytes, strided as it was, on `device` (else on the kind it lived on)."""
    place_at = device or torch.device(leaf.device)
    dtype = getattr(torch, leaf.dtype)
    if leaf.stride:
        made = torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=place_at)
    else:
        made = torch.empty(leaf.shape, dtype=dtype, device=place_at)
    return made.copy_(stored(leaf, payload))


def value_of(node: Node, leaves: Mapping[int, Leaf] | tuple[Leaf, ...], payload: Payload) -> Any:
    """Return the value that a tree stands for; its tensors and arrays own their memory."""
    if isinstance(node, Ref):
        leaf = leaves[node.leaf]
        return fresh(leaf, payload) if leaf.kind == "tensor" else _array(leaf, payload)
    rebuild = _CONTAINERS.get(type(node))
    return node if rebuild is None else rebuild(node, lambda _, child: value_of(child, leaves, payload))


def _array(leaf: Leaf, payload: Payload) -> Any:
    raw = bytes(payload(leaf)) if leaf.nbytes else b""
    array = np.frombuffer(bytearray(raw), np.dtype(leaf.dtype)).reshape(leaf.shape)
    return array if leaf.kind == "array" else array[()]


def total_bytes(leaves: Iterable[Leaf]) -> int:
    """Return the bytes that leaves take in a payload, aliases once."""
    return sum(leaf.nbytes for leaf in leaves if leaf.alias_of is None)
