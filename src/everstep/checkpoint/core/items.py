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
Rule 5: no two things of a rank share a name: the later in the walk gets a number. All ranks walk alike.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.core.archive import STORAGES, UNTYPED
from everstep.checkpoint.core.layout import Layout, Leaf, Pickled, Pieces, Ref, Section
from everstep.checkpoint.core.manifest import entry_id
from everstep.errors import CheckpointError

NUMPY_TYPES = {
    "|b1": "bool", "|u1": "uint8", "|i1": "int8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<u4": "uint32",
    "<i8": "int64", "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64",
    "<c16": "complex128",
}  # fmt: skip
"""torch's names of numpy's element types; any other array is written as its bytes."""

Path = tuple[str | int, ...]
_HELD = (Ref, Pieces, Pickled)


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
    named = list(_tensors(layout))
    load = [(0, rank) for rank in range(layout.world_size)]
    owners: dict[str, int] = {}
    shared = [item for item in named if item.replicated and item.leaf.alias_of is None]
    for item in sorted(shared, key=lambda i: (-i.leaf.nbytes, i.name)):
        written, rank = heapq.heappop(load)
        heapq.heappush(load, (written + item.leaf.nbytes, rank))
        owners[item.leaf.path] = rank
    return tuple(
        TensorItem(i.leaf, i.name, i.path, owners[i.original], replicated=True) if i.replicated else i for i in named
    )


def values(layout: Layout) -> Iterator[ValueItem]:
    """All plain values of the trees; those that every rank holds are rank 0's to write."""
    for section, path, node, held in _named(layout):
        if held is None:
            yield ValueItem(node, dotted(path), path, layout.rank if section.per_rank else 0)


def _tensors(layout: Layout) -> Iterator[TensorItem]:
    for _, path, _, held in _named(layout):
        for leaf in held or ():
            yield TensorItem(leaf, dotted(path), path, layout.rank, replicated=_shared(layout, leaf))


def _named(layout: Layout) -> Iterator[tuple[Section, Path, Any, list[Leaf] | None]]:
    """Every node at which a tree ends, its path, and the leaves that it stands for; None for a plain value (rule 5)."""
    taken: set[str] = set()
    for section in layout.sections:
        for path, node in walk(section.tree):
            numbers = leaves_of(node)
            held = None if numbers is None else [section.leaves[n] for n in numbers]
            own = section.per_rank if held is None else any(x.per_rank and not _shared(layout, x) for x in held)
            whole = _apart(_prefix(section.name, layout.rank, own=own) + path, taken)
            taken.add(dotted(whole))
            yield section, whole, node, held


def _apart(path: Path, taken: set[str]) -> Path:
    """The path; where another has its name already (the keys 1 and "1", "a.b" and "a" holding "b"), with a number."""
    found, count = path, 1
    while dotted(found) in taken:
        count += 1
        found = (*path[:-1], f"{path[-1]}#{count}")
    return found


def _shared(layout: Layout, leaf: Leaf) -> bool:
    return leaf.replicated or (layout.world_size == 1 and not leaf.per_rank)


def leaves_of(node: Any) -> tuple[int, ...] | None:
    """Return the numbers of the leaves for which a node stands; None where it is a plain value or a container."""
    match node:
        case Ref() | Pickled():
            return (node.leaf,)
        case Pieces():
            return node.leaves
        case _:
            return None


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
    return isinstance(value, _HELD)
