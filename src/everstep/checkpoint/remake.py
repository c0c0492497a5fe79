"""From a tree and its leaves back to the value: tensors and arrays with memory of their own, sharded ones as such.

Rule 1: what was one tensor in two places is one again; what overlapped in memory overlaps again (core/sharing.py).
Rule 2: a sharded tensor never comes back as its local part under the same name, which would be taken for the whole: a
    DTensor needs a live one (at its place, or any of the state with a mesh of its shape) to lend it its mesh; where
    none is found it is refused. A ShardedTensor carries its metadata.
Rule 3: nothing is unpickled unless that was asked for: `pickled_in` finds what would be, before anything is written.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.items import leaves_of, walk
from everstep.checkpoint.core.layout import Leaf, Node, Pickled, Pieces, Ref, Section
from everstep.checkpoint.sharded import facts, sharded_tensor
from everstep.checkpoint.tensors import CONTAINERS, Payload, stored
from everstep.errors import StateMismatch

Live = Callable[[], Any]
"""Returns the live value of the same form, for those that need one."""


def value_of(
    node: Node,
    leaves: Mapping[int, Leaf] | Sequence[Leaf],
    payload: Payload,
    *,
    allow_pickle: bool = False,
    live: Any = None,
    lenders: Sequence[DTensor] = (),
) -> Any:
    """Return the value that a tree stands for; its tensors and arrays own their memory.

    `live` is a value of the same form, whose DTensors lend their meshes; `lenders` are others that may. Raises
    StateMismatch for a DTensor that nobody lends a mesh, for a pickle that is not allowed or cannot be read.
    """
    return Remaking(leaves, payload, allow_pickle, lenders).value(node, live)


@dataclass
class Remaking:
    """One section on its way back."""

    leaves: Mapping[int, Leaf] | Sequence[Leaf]
    payload: Payload
    allow_pickle: bool = False
    lenders: Sequence[DTensor] = ()
    _made: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _shares: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def value(self, node: Node, live: Any = None) -> Any:
        """Return what `node` stands for."""
        if isinstance(node, Ref):
            leaf = self.leaves[node.leaf]
            return self._tensor(leaf, live) if leaf.kind == "tensor" else _array(leaf, self.payload)
        if isinstance(node, Pieces):
            return self._pieces(node)
        if isinstance(node, Pickled):
            return self._unpickled(self.leaves[node.leaf])
        rebuild = CONTAINERS.get(type(node))
        return node if rebuild is None else rebuild(node, lambda key, child: self.value(child, at(live, key)))

    def _tensor(self, leaf: Leaf, live: Any) -> Tensor:
        name = leaf.alias_of or leaf.path
        local = self._made.get(name)
        if local is None:
            local = self._made[name] = self._shared(leaf) if leaf.shares else fresh(leaf, self.payload)
        return local if not leaf.placements else self._spread(leaf, local, live)

    def _shared(self, leaf: Leaf) -> Tensor:
        number, begin, size = leaf.shares or (0, 0, 0)
        if number not in self._shares:
            self._shares[number] = torch.empty(size, dtype=torch.uint8, device=torch.device(leaf.device))
        dtype = getattr(torch, leaf.dtype)
        whole = self._shares[number]
        count = (whole.numel() - begin) // dtype.itemsize * dtype.itemsize
        row = whole[begin : begin + count].view(dtype)
        made = row.as_strided(leaf.shape, leaf.stride or _row_major(leaf.shape), row.storage_offset())
        return made.copy_(stored(leaf, self.payload)) if not _spread_over(made) else _filled(made, leaf, self.payload)

    def _spread(self, leaf: Leaf, local: Tensor, live: Any) -> Tensor:
        for lender in (live, *self.lenders):
            if isinstance(lender, DTensor) and _lends(lender, leaf):
                mesh, placements = lender.device_mesh, lender.placements
                stride = _row_major(leaf.whole_shape)
                made = DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=torch.Size(leaf.whole_shape), stride=stride
                )
                told = facts(made, leaf.path)
                if (told["global_shape"], told["offsets"]) == (leaf.global_shape, leaf.offsets):
                    return made
        raise StateMismatch(
            f"{leaf.path} was saved as a DTensor of shape {list(leaf.whole_shape)}, placed {list(leaf.placements)}; no "
            "live DTensor of the state is placed so, from which it could have its mesh. Build the object with its "
            "DTensors before it is restored."
        )

    def _pieces(self, node: Pieces) -> Any:
        if node.spec is None:
            raise StateMismatch("the saved ranges of an FSDP1 parameter can only be taken up by FSDP1")
        dtype = getattr(torch, node.dtype)
        shards = [(self.leaves[n].starts, self._tensor(self.leaves[n], None)) for n in node.leaves]
        return sharded_tensor(node.spec, node.shape, dtype, shards)

    def _unpickled(self, leaf: Leaf) -> Any:
        if not self.allow_pickle:
            raise StateMismatch(refusal([leaf.path]))
        try:
            return pickle.loads(bytes(self.payload(leaf)))
        except Exception as error:
            raise StateMismatch(
                f"{leaf.path} was pickled when it was saved and cannot be made again: {type(error).__name__}: {error}. "
                "Its class must be importable under its old name, and take its old state."
            ) from error


def at(live: Any, key: Any) -> Any:
    """Return what stands under `key` in a live container; None where nothing does."""
    try:
        return live[key]
    except (KeyError, IndexError, TypeError):
        return None


def pickled_in(section: Section) -> Iterator[str]:
    """Yield the paths of a section's objects that were pickled."""
    if not any(leaf.kind == "pickle" for leaf in section.leaves):  # the tree need not be walked
        return
    for _, node in walk(section.tree):
        if isinstance(node, Pickled):
            yield section.leaves[node.leaf].path


def refusal(paths: Sequence[str]) -> str:
    """Say that something was pickled and may not be read."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"{paths[0]}{more} was saved with allow_pickle=True. Reading it runs code that the file names: pass "
        "allow_pickle=True here too if you trust whoever wrote it"
    )


def spread_in(section: Section) -> bool:
    """True where a section holds tensors that need a live one's mesh."""
    return any(leaf.placements for leaf in section.leaves)


def numbers_in(tree: Node) -> Iterator[int]:
    """Yield the leaves of a tree."""
    for _, node in walk(tree):
        yield from leaves_of(node) or ()


def fresh(leaf: Leaf, payload: Payload, device: torch.device | None = None) -> Tensor:
    """Return a new tensor with the leaf's bytes, strided as it was, on `device` (else on the kind it lived on)."""
    place_at = device or torch.device(leaf.device)
    if not leaf.stride and place_at.type == "cpu":
        return stored(leaf, payload).clone()
    dtype = getattr(torch, leaf.dtype)
    if leaf.stride and not _folded(leaf.shape, leaf.stride):
        made = torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=place_at)
    else:
        made = torch.empty(leaf.shape, dtype=dtype, device=place_at)
    return made.copy_(stored(leaf, payload))


def _lends(lender: DTensor, leaf: Leaf) -> bool:
    return bool(facts(lender, leaf.path)["placements"] == leaf.placements)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = list[int](), 1
    for count in reversed(shape):
        strides.insert(0, step)
        step *= max(count, 1)
    return tuple(strides)


def _folded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True where several of a tensor's elements are one in memory (`expand`), or wide gaps lie between them."""
    reach = 1
    for step, count in sorted(zip(stride, shape, strict=True)):
        if count > 1 and step != reach:
            return True
        reach = step * count if count > 1 else reach
    return False


def _spread_over(made: Tensor) -> bool:
    return any(step == 0 and count > 1 for step, count in zip(made.stride(), made.shape, strict=True))


def _filled(made: Tensor, leaf: Leaf, payload: Payload) -> Tensor:
    """Fill an expanded tensor: each of its elements once."""
    source, target = stored(leaf, payload), made
    for d, step in enumerate(made.stride()):
        if step == 0:
            target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
    target.copy_(source)
    return made


def _array(leaf: Leaf, payload: Payload) -> Any:
    if leaf.kind in ("bytes", "bytearray"):
        return bytes(payload(leaf)) if leaf.kind == "bytes" else bytearray(payload(leaf))
    raw = bytes(payload(leaf)) if leaf.nbytes else b""
    dtype = np.dtype(leaf.dtype)
    if not dtype.itemsize:
        return np.empty(leaf.shape, dtype) if leaf.kind == "array" else np.empty((), dtype)[()]
    array = np.frombuffer(bytearray(raw), dtype).reshape(leaf.shape)
    return array if leaf.kind == "array" else array[()]
