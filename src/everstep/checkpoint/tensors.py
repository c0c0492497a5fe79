"""Tensors, arrays and numpy scalars as leaves of a layout; a value of any depth as a tree of them.

Reading never changes the live object: no hook runs, no collective is issued, nothing is gathered. What cannot be
kept exactly (sparse, quantised, nested, meta, tensor subclasses, objects) is a TypeError that names its key; or, where
the save allows it, a pickle, whose bytes are a leaf. `remake` is the way back.
"""

import dataclasses
import functools
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.layout import (
    ITEM_BYTES,
    MAX_DEPTH,
    Leaf,
    Node,
    Pickled,
    Pieces,
    Ref,
    Section,
    encode,
    place,
    unsavable,
)
from everstep.checkpoint.core.plain import Plain, plain
from everstep.checkpoint.core.rectangles import Rectangle
from everstep.checkpoint.core.sharing import Extent, shared
from everstep.checkpoint.outline import Outline
from everstep.checkpoint.sharded import facts, is_sharded_tensor, local_of, shards_of, spec_of

Payload = Callable[[Leaf], bytearray | memoryview]
"""Returns the writable bytes of a leaf."""

LARGE = (bytes, bytearray)
LARGE_BYTES = 4096
"""Longer ones are leaves: in the description they would be text, a third longer and in memory several times."""

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


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
        placed = Section(section.name, section.tree, leaves, section.per_rank, section.text, section.kind)
        return Part(placed, self.sources, self.late)


@dataclass(slots=True)
class Collector:
    """Gathers the leaves of one section. Two views of the same memory of the same shape become aliases."""

    name: str
    replicated: bool = False  # of plain tensors; a DTensor says it of itself
    per_rank: bool = False
    allow_pickle: bool = False
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
        leads: bool = False,
    ) -> Ref:
        """Add a tensor; `late` where nothing but an optimizer's step writes it."""
        check(value, path)
        path = self._unique(path)
        plain_replicated = self.replicated if replicated is None else replicated
        plain_own = self.per_rank if per_rank is None else per_rank
        local = self.local = local_of(value)
        dtensor = facts(value, path) if isinstance(value, DTensor) else {}
        told: dict[str, Any] = {"replicated": plain_replicated, "per_rank": plain_own, "leads": leads} | dtensor
        stride = () if local.is_contiguous() else tuple(local.stride())
        alias = self._alias(path, local)
        if late and alias is None:
            self.late.add(len(self.sources))
        return self._add(
            Leaf(
                path, dtype_name(local.dtype), tuple(local.shape), local.numel() * local.element_size(),
                stride=stride, device=local.device.type, alias_of=alias, **told,
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

    def pieces(
        self,
        path: str,
        pieces: Iterable[tuple[Rectangle, Tensor]],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        replicated: bool = False,
        late: bool = False,
        spec: Any = None,
    ) -> Pieces:
        """Add this rank's rectangles of one tensor."""
        numbers: list[int] = []
        for box, value in pieces:
            offsets = box.offsets if any(box.offsets) else None
            told = {"global_shape": tuple(shape), "offsets": offsets, "replicated": replicated}
            numbers.append(self._piece(path, value, told, late=late))
        return Pieces(tuple(numbers), tuple(shape), dtype_name(dtype), spec)

    def node(self, path: str, value: Any, depth: int = 0) -> Node:
        """Return `value` as a tree; its tensors and arrays become leaves, what may be pickled bytes."""
        try:
            return self._node(path, value, depth)
        except TypeError:
            if not self.allow_pickle or type(value) in CONTAINERS or _sharded(value):
                raise
        return self._pickled(path, value)

    def _node(self, path: str, value: Any, depth: int) -> Node:
        if is_sharded_tensor(value):
            spec, boxes = spec_of(value), [(Rectangle(o, tuple(t.shape)), t) for o, t in shards_of(value, path)]
            told = value.metadata()
            return self.pieces(path, boxes, told.size, told.tensor_properties.dtype, spec=spec)
        if isinstance(value, Tensor):
            return self.tensor(path, value)
        if isinstance(value, np.ndarray | np.generic):
            return self.array(path, value)
        if type(value) in LARGE and len(value) > LARGE_BYTES:
            return self._bytes(path, value)
        if depth > MAX_DEPTH:
            raise TypeError(f"{path[:200]} is nested deeper than {MAX_DEPTH} levels, or contains itself; a snapshot "
                            "holds trees.")  # fmt: skip
        rebuild = CONTAINERS.get(type(value))
        if rebuild is None:
            encode(value, path)  # it says what it cannot hold, an element of a set too
            return value
        if isinstance(value, dict) and not self._keys(path, value):
            return self._pickled(path, value)
        return rebuild(value, lambda key, child: self.node(f"{path}/{key}", child, depth + 1))

    def _keys(self, path: str, value: dict[Any, Any]) -> bool:
        """True where all keys are plain; where one is not, False if the whole may be pickled, else TypeError."""
        try:
            for key in value:
                if type(key) is not str:
                    encode(key, f"{path}/{key!r} (a key)")
        except TypeError:
            if not self.allow_pickle:
                raise
            return False
        return True

    def _pickled(self, path: str, value: Any) -> Node:
        try:
            content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}; allow_pickle=True lets it be "
                f"pickled, but pickle refused it: {type(error).__name__}: {error}. Leave it out."
            ) from error
        leaf = Leaf(self._unique(path), "|u1", (len(content),), len(content), kind="pickle",
                    replicated=self.replicated, per_rank=self.per_rank)  # fmt: skip
        return Pickled(self._add(leaf, torch.frombuffer(bytearray(content), dtype=torch.uint8)).leaf)

    def _bytes(self, path: str, value: bytes | bytearray) -> Ref:
        leaf = Leaf(self._unique(path), "|u1", (len(value),), len(value), kind=type(value).__name__,
                    replicated=self.replicated, per_rank=self.per_rank)  # fmt: skip
        return self._add(leaf, torch.frombuffer(bytearray(value), dtype=torch.uint8))

    def share(self) -> None:
        """Say of leaves that overlap in memory, without being aliases, how they lie, so that they will again."""
        extents: list[Extent] = []
        own = [n for n, leaf in enumerate(self.leaves) if leaf.alias_of is None]
        for n, source in zip(own, self.sources, strict=True):
            if self.leaves[n].kind == "tensor" and source.numel() and _lies_plainly(source):
                begin, size = source.data_ptr(), source.element_size()
                last = sum((count - 1) * step for count, step in zip(source.shape, source.stride(), strict=True))
                extents.append(Extent(n, str(source.device), begin, begin + (last + 1) * size))
        for n, group in shared(extents).items():
            self.leaves[n] = dataclasses.replace(self.leaves[n], shares=group)

    def _piece(self, path: str, value: Tensor, told: dict[str, Any], *, late: bool) -> int:
        check(value, path)
        path = self._unique(path)
        local = local_of(value)
        stride = () if local.is_contiguous() else tuple(local.stride())
        alias = self._alias(path, local)
        if late and alias is None:
            self.late.add(len(self.sources))
        leaf = Leaf(path, dtype_name(local.dtype), tuple(local.shape), local.numel() * local.element_size(),
                    stride=stride, device=local.device.type, alias_of=alias, **told)  # fmt: skip
        return self._add(leaf, local).leaf

    def part(self, tree: Node, *, per_rank: bool = False, kind: str = "") -> Part:
        """Return what was gathered."""
        section = Section(self.name, tree, tuple(self.leaves), per_rank, kind=kind)
        return Part(section, tuple(self.sources), frozenset(self.late))

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

    def __init__(
        self,
        name: str,
        *,
        replicated: bool = False,
        per_rank: bool = False,
        allow_pickle: bool = False,
        kind: str = "",
    ) -> None:
        self._name, self._replicated, self._per_rank, self._kind = name, replicated, per_rank, kind
        self._allow_pickle = allow_pickle
        self._known: Plain | None = None
        self._outline: Outline | None = None
        self._part: Part | None = None

    def part(self, value: Any) -> Part:
        """Return `value` as a part: in one call where it is plain, node by node where it holds tensors.

        The part of the last time, where nothing but the bytes of tensors may have changed since.
        """
        known, part = self._known, self._part
        if part is None or not part.section.leaves:  # what held a tensor the last time will hold one now
            made = plain(value, known)
            if made is not None:
                if part is None or made is not known:
                    part = Part(Section(self._name, made.value, (), self._per_rank, made.text, self._kind), ())
                self._known, self._part = made, part
                return part
        outline, known_outline, self._outline = Outline.of(value), self._outline, None
        if part is None or outline is None or known_outline is None or not known_outline.same(outline, part.sources):
            part = self._walked(value)
        self._known, self._outline, self._part = None, outline, part
        return part

    def _walked(self, value: Any) -> Part:
        collector = Collector(self._name, self._replicated, self._per_rank, self._allow_pickle)
        tree = collector.node(self._name, value)
        collector.share()
        return collector.part(tree, per_rank=self._per_rank, kind=self._kind)


def _names(values: list[Any]) -> bool:
    """A list of strings alone (an optimizer's parameters, hundreds of them at every step) is a tree as it is."""
    return all(type(value) is str for value in values)


def _lies_plainly(source: Tensor) -> bool:
    return not (source.is_conj() or source.is_neg() or source.data_ptr() % source.element_size())


def _sharded(value: Any) -> bool:
    return isinstance(value, DTensor) or is_sharded_tensor(value)


Child = Callable[[Any, Any], Node]
CONTAINERS: dict[type, Callable[[Any, Child], Node]] = {
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


def as_saved(leaf: Leaf, live: Tensor) -> bool:
    """True for a plain tensor that is as the leaf says: nearly all are, and this is told in a fifth of a `check`."""
    return (
        type(live) in _PLAIN
        and live.dtype is _DTYPES.get(leaf.dtype)
        and live.shape == leaf.shape
        and leaf.global_shape is None
        and live.layout is torch.strided
        and not (live.is_nested or live.is_meta)
    )


def view(raw: Tensor, leaf: Leaf) -> Tensor:
    """Return the view of a leaf over `raw`, its bytes as a uint8 tensor."""
    return raw.view(_DTYPES[leaf.dtype]).view(leaf.shape) if leaf.kind == "tensor" else raw


def stored(leaf: Leaf, payload: Payload) -> Tensor:
    """Return a view of a tensor leaf's stored bytes, row-major; it lives as long as the payload's memory does."""
    dtype = _DTYPES[leaf.dtype]
    if leaf.nbytes == 0:
        return torch.empty(leaf.shape, dtype=dtype)
    row = torch.frombuffer(payload(leaf), dtype=dtype)
    return row if len(leaf.shape) == 1 else row.view(leaf.shape)


def payload_of(part: Part) -> Payload:
    """Return the bytes of a part's own live tensors, as they are now."""
    leaves = (leaf for leaf in part.section.leaves if leaf.alias_of is None)
    sources = {leaf.path: source for leaf, source in zip(leaves, part.sources, strict=True)}

    def read(leaf: Leaf) -> bytearray:
        source = sources[leaf.alias_of or leaf.path].detach().cpu().resolve_conj().resolve_neg().contiguous()
        return bytearray(source.reshape(-1).view(torch.uint8).numpy().tobytes()) if leaf.nbytes else bytearray()

    return read


def total_bytes(leaves: Iterable[Leaf]) -> int:
    """Return the bytes that leaves take in a payload, aliases once."""
    return sum(leaf.nbytes for leaf in leaves if leaf.alias_of is None)
