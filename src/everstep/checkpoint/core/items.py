"""What of a rank's snapshot is written, under which name, and by whom: computed by each rank alone, agreed by none.

Rule 1: a shard is written by the rank that holds it; what all ranks hold bit for bit by one of them, the one that has
been given the fewest bytes so far (EXPERIMENTS C8); what belongs to a rank alone by that rank, under a name that
carries the rank. The same layouts give the same owners everywhere.
Rule 2: names are DCP's: the keys of nested containers joined by dots, containers followed as DCP follows them (into
mappings, and into lists that hold tensors or mappings; tuples only where a tensor is inside).
Rule 3: what differs by rank has, for readers that know no ranks, rank 0's also under the plain name (`plain`): an
optimizer's groups and a scheduler are the same on all ranks in practice, and `dcp.load` finds them.
Rule 4: an alias is written once, under its original's name; each of its other names is an entry of its own over the
same bytes, so that `dcp.load` finds tied weights under both names and neither costs space.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.checkpoint.core.archive import STORAGES, UNTYPED
from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section
from everstep.checkpoint.core.manifest import entry_id
from everstep.errors import CheckpointError

NUMPY_TYPES = {
    "|b1": "bool", "|u1": "uint8", "|i1": "int8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<u4": "uint32",
    "<i8": "int64", "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64",
    "<c16": "complex128",
}  # fmt: skip
"""torch's names of numpy's element types; any other array is written as its bytes."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A leaf, and what it is called in a checkpoint."""

    leaf: Leaf
    name: str
    path: Path
    owner: int  # the rank that writes it
    replicated: bool

    @property
    def id(self) -> str:
        """The id of its entry."""
        return entry_id(self.name, self.offsets)

    @property
    def original(self) -> str:
        """Path of the leaf whose bytes these are."""
        return self.leaf.alias_of or self.leaf.path

    @property
    def known(self) -> str | None:
        """torch's name of the element type; None where no archive is known for it."""
        name = self.leaf.dtype if self.leaf.kind == "tensor" else NUMPY_TYPES.get(self.leaf.dtype, "")
        return name if name in STORAGES or name in UNTYPED else None

    @property
    def dtype(self) -> str:
        """The element type under which it is written: its own, or bytes."""
        return self.known or "uint8"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of what is written; elements of a foreign type are a row of bytes."""
        return self.leaf.shape if self.known else (self.leaf.nbytes,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        if self.leaf.global_shape is None:
            return self.sizes
        if not self.known:
            raise CheckpointError(
                f"{self.name} is a shard of element type {self.leaf.dtype}, which DCP's files cannot hold; "
                "convert it before it is saved"
            )
        return self.leaf.global_shape

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this chunk begins in the whole tensor."""
        return (0,) * len(self.sizes) if self.leaf.offsets is None else self.leaf.offsets


@dataclass(frozen=True, slots=True)
class ValueItem:
    """A plain value, and what it is called in a checkpoint."""

    value: Any
    name: str
    path: Path
    owner: int


def tensors(layout: Layout) -> tuple[TensorItem, ...]:
    """All leaves of a rank's snapshot with their names and owners, in payload order."""
    named = [item for section in layout.sections for item in _named(layout, section)]
    load = [(0, rank) for rank in range(layout.world_size)]
    owners: dict[str, int] = {}
    shared = [item for item in named if item.replicated and item.leaf.alias_of is None]
    for item in sorted(shared, key=lambda i: (-i.leaf.nbytes, i.name)):
        written, rank = heapq.heappop(load)
        heapq.heappush(load, (written + item.leaf.nbytes, rank))
        owners[item.leaf.path] = rank
    return tuple(replace(i, owner=owners[i.original]) if i.replicated else i for i in named)


def values(layout: Layout) -> Iterator[ValueItem]:
    """All plain values of the trees; those that every rank holds are rank 0's to write."""
    for section in layout.sections:
        prefix, owner = _prefix(section.name, layout.rank, own=section.per_rank), layout.rank if section.per_rank else 0
        for path, value in walk(section.tree):
            if not isinstance(value, Ref):
                yield ValueItem(value, dotted(prefix + path), prefix + path, owner)


def _named(layout: Layout, section: Section) -> Iterator[TensorItem]:
    for path, ref in walk(section.tree):
        if isinstance(ref, Ref):
            leaf = section.leaves[ref.leaf]
            shared = leaf.replicated or (layout.world_size == 1 and not leaf.per_rank)
            own = not shared and leaf.global_shape is None
            whole = _prefix(section.name, layout.rank, own=own) + path
            yield TensorItem(leaf, dotted(whole), whole, layout.rank, replicated=shared)


def _prefix(section: str, rank: int, *, own: bool) -> Path:
    parts = tuple(section.split("/"))
    return ("ranks", str(rank), *parts) if own else parts


def plain(path: Path) -> Path | None:
    """The path without its rank; None for one that carries none."""
    return path[2:] if path[0] == "ranks" else None


def dotted(path: Path) -> str:
    """DCP's flat name of a path."""
    return ".".join(map(str, path))


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All leaves and values of a tree with their paths."""
    if isinstance(tree, Mapping) and tree and (_plain_keys(tree) or _holds_ref(tree)):
        for key, value in tree.items():
            yield from walk(value, (*path, str(key)))
    elif isinstance(tree, list | tuple | deque) and _followed(tree):
        for n, value in enumerate(tree):
            yield from walk(value, (*path, n))
    else:
        yield path, tree


def _plain_keys(tree: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str | int) for key in tree)


def _followed(items: Sequence[Any] | deque[Any]) -> bool:
    mappings = isinstance(items, list) and any(isinstance(value, Mapping) for value in items)
    return mappings or any(_holds_ref(value) for value in items)


def _holds_ref(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_ref, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_holds_ref, value))
    return isinstance(value, Ref)
