"""Tensors that ranks hold in pieces, taken up by a world that is divided otherwise: FSDP1's ranges, a ShardedTensor.

How many rectangles of a tensor a rank has, and whether it has any of it, differs from rank to rank: so its parts are
brought together by their place in the tree, never by the number of a leaf. What is wanted is told by place too: one
rectangle (a tensor, a shard of FSDP2) or several (`Parts`).

Rule 1: rectangles are cut out of rectangles, as everywhere (`reshard` rule 1): each wanted element from exactly one.
Rule 2: what is no tensor in pieces must be alike on all ranks that hold a part of what it stands beside (a counter of
    an optimizer; a rank without elements of a parameter may have none, or one of its own), else it is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.checkpoint.core.layout import Leaf, Node, Pickled, Pieces, Ref, Section, expected_bytes, printed
from everstep.checkpoint.core.trees import in_pieces

Place = tuple[Any, ...]
"""Keys and numbers that lead to a node of a section's tree."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor of which this rank wants several rectangles, or none."""

    shape: tuple[int, ...]  # of the whole tensor
    leaves: tuple[Leaf, ...]  # of the live object
    spec: Any = None  # see `Pieces`
    nothing: bool = False  # where this rank has none of it, nothing stands at its place


Wanted = Leaf | Parts
Held = tuple[int, Leaf]
"""A rectangle of a rank that saved."""


@dataclass(slots=True)
class Joined:
    """A tree of this world, its leaves, and where each comes from."""

    tree: Node = None
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    sources: dict[str, tuple[Held, ...]] = field(default_factory=dict[str, tuple[Held, ...]])  # by path, nearest first
    refused: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Joiner:
    """One section of all ranks that saved on its way to one of this world."""

    ranks: Sequence[Section]
    wanted: Mapping[Place, Wanted]
    same: Callable[[Sequence[Held]], bool]  # equal bytes on all
    own: int  # the rank whose number is ours
    same_size: bool  # each rank is a rank of the other world: what belongs to it alone is its own
    made: Joined = field(default_factory=Joined)
    _paths: set[str] = field(default_factory=set[str])

    def join(self) -> Joined:
        """Return the section's tree for this rank."""
        self.made.tree = self._node((), {n: section.tree for n, section in enumerate(self.ranks)})
        return self.made

    def _node(self, place: Place, nodes: Mapping[int, Node]) -> Node:
        first = next(iter(nodes.values()))
        if any(_is_tensor(self.ranks[n], node) for n, node in nodes.items()):
            return self._tensor(place, nodes)
        if all(isinstance(node, dict) for node in nodes.values()):
            return self._dict(place, nodes)
        if _rows(nodes) and not isinstance(first, str):
            made = [self._node((*place, k), {n: node[k] for n, node in nodes.items()}) for k in range(len(first))]
            return type(first)(made)
        return self._plain(place, nodes)

    def _dict(self, place: Place, nodes: Mapping[int, Node]) -> Node:
        holders = _holders(self.ranks, nodes)
        first = next(iter(nodes.values()))
        made: dict[Any, Node] = {}
        for key in dict.fromkeys(key for node in nodes.values() for key in node):
            want = self.wanted.get((*place, key))
            if isinstance(want, Parts) and want.nothing:
                continue
            there = {n: node[key] for n, node in nodes.items() if key in node}
            told = {n: node for n, node in there.items() if n in holders} or there
            if len(told) < len(holders) and not any(in_pieces(node) for node in there.values()):
                lacking = min(set(holders) - set(told))
                self._refuse((*place, key), f"is not there on rank {lacking}")
            made[key] = self._node((*place, key), told)
        return type(first)(made)

    # tensors

    def _tensor(self, place: Place, nodes: Mapping[int, Node]) -> Node:
        held = [(n, leaf) for n, node in nodes.items() for leaf in _leaves(self.ranks[n], node)]
        pieces = [node for node in nodes.values() if isinstance(node, Pieces)]
        facts = {(leaf.dtype, leaf.whole_shape) for _, leaf in held} | {(node.dtype, node.shape) for node in pieces}
        if len(facts) > 1:
            self._refuse(place, f"is {' and '.join(f'{d}{list(s)}' for d, s in sorted(facts))} on different ranks")
        dtype, shape = min(facts)
        held = self._in_order(place, held, whole=not pieces and not _spread(held))
        wanted = self._wanted(place, shape)
        if isinstance(wanted, Parts):
            return Pieces(
                tuple(self._leaf(place, _like(x, dtype), held) for x in wanted.leaves), shape, dtype, wanted.spec
            )
        if wanted is not None:
            made = _like(wanted, dtype)
        elif held and not pieces and not _spread(held):
            made = replace(held[0][1], alias_of=None, shares=None)
        else:
            self._refuse(place, "was saved in pieces, and nothing says how it is divided here")
            made = Leaf("", dtype, shape, 0)
        return Ref(self._leaf(place, made, held))

    def _in_order(self, place: Place, held: list[Held], *, whole: bool) -> list[Held]:
        """Of equal ones the nearest first; of a whole one that differs by rank rank 0's, where that is what all get."""
        near = sorted(held, key=lambda one: one[0] != self.own)
        alike = self.same_size or all(leaf.replicated for _, leaf in held)
        if not whole or alike or self.same(held):
            return near
        if not all(leaf.leads for _, leaf in held):
            self._refuse(place, "differs from rank to rank: it belongs to each rank alone")
        return held

    def _wanted(self, place: Place, shape: tuple[int, ...]) -> Wanted | None:
        """What is wanted at a place, or beside the tensor of that shape above it (an optimizer's state)."""
        exact = self.wanted.get(place)
        beside = self.wanted.get(place[:-1]) if exact is None and place else None
        return beside if beside is not None and shape and _whole_shape(beside) == shape else exact

    def _leaf(self, place: Place, leaf: Leaf, held: Sequence[Held]) -> int:
        path = self._path(place)
        leaf = replace(leaf, path=path)
        size = expected_bytes(leaf)
        self.made.leaves.append(leaf if size is None else replace(leaf, nbytes=size))
        self.made.sources[path] = tuple(held)
        return len(self.made.leaves) - 1

    def _path(self, place: Place) -> str:
        base = "/".join([self.ranks[0].name, *map(str, place)])
        path, count = base, 1
        while path in self._paths:
            count += 1
            path = f"{base}#{count}"
        self._paths.add(path)
        return path

    # all else

    def _plain(self, place: Place, nodes: Mapping[int, Node]) -> Node:
        """A value, an array, bytes: alike on all, or refused."""
        held = [(n, leaf) for n, node in nodes.items() for leaf in _leaves(self.ranks[n], node)]
        kinds = {printed(None if isinstance(node, Ref | Pickled) else node) for node in nodes.values()}
        if not self.same_size and (len(kinds) > 1 or (held and not self.same(held))):
            self._refuse(place, "differs from rank to rank: it belongs to each rank alone")
        node = nodes.get(self.own, next(iter(nodes.values())))
        if not isinstance(node, Ref | Pickled):
            return node
        source = self.own if self.own in nodes else next(iter(nodes))
        leaf = self.ranks[source].leaves[node.leaf]
        number = self._leaf(place, replace(leaf, alias_of=None, shares=None), [(source, leaf)])
        return type(node)(number)

    def _refuse(self, place: Place, why: str) -> None:
        path = "/".join([self.ranks[0].name, *map(str, place)])
        self.made.refused.setdefault(path, f"{path} {why}")


def at_place(tree: Node, place: Place) -> Node:
    """The node at a place; None where there is none."""
    for key in place:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def tensors_of(section: Section) -> dict[Place, Wanted]:
    """All tensors of a live section by their places, as they are wanted."""
    found: dict[Place, Wanted] = {}

    def look(place: Place, node: Node) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                look((*place, key), child)
        elif isinstance(node, list | tuple):
            for n, child in enumerate(node):
                look((*place, n), child)
        elif isinstance(node, Pieces):
            leaves = tuple(section.leaves[n] for n in node.leaves)
            found[place] = Parts(node.shape, leaves, node.spec)
        elif isinstance(node, Ref) and section.leaves[node.leaf].kind == "tensor":
            found[place] = section.leaves[node.leaf]

    look((), section.tree)
    return found


def _is_tensor(section: Section, node: Node) -> bool:
    return isinstance(node, Pieces) or (isinstance(node, Ref) and section.leaves[node.leaf].kind == "tensor")


def _rows(nodes: Mapping[int, Node]) -> bool:
    kinds = {(type(node), len(node) if isinstance(node, list | tuple) else None) for node in nodes.values()}
    return len(kinds) == 1 and next(iter(kinds))[0] in (list, tuple)


def _leaves(section: Section, node: Node) -> list[Leaf]:
    if isinstance(node, Pieces):
        return [section.leaves[n] for n in node.leaves]
    return [section.leaves[node.leaf]] if isinstance(node, Ref | Pickled) else []


def _holders(ranks: Sequence[Section], nodes: Mapping[int, Node]) -> frozenset[int]:
    """Ranks that hold an element of a tensor in pieces of this dict; all, where there is none such."""
    pieces = [(n, child) for n, node in nodes.items() for child in node.values() if isinstance(child, Pieces)]
    with_some = {n for n, child in pieces if any(ranks[n].leaves[k].nbytes for k in child.leaves)}
    return frozenset(with_some or nodes)


def _spread(held: Sequence[Held]) -> bool:
    return any(leaf.placements or leaf.global_shape is not None for _, leaf in held)


def _whole_shape(wanted: Wanted) -> tuple[int, ...]:
    return wanted.shape if isinstance(wanted, Parts) else wanted.whole_shape


def _like(live: Leaf, dtype: str) -> Leaf:
    """A live leaf's place in the whole, for bytes of that dtype."""
    return Leaf(
        live.path, dtype, live.shape, 0, global_shape=live.global_shape, offsets=live.offsets,
        replicated=live.replicated, per_rank=live.per_rank, placements=live.placements, device=live.device,
    )  # fmt: skip


def cut_otherwise(section: Section, wanted: Mapping[Place, Wanted]) -> bool:
    """True where a tensor of one shape was saved in other pieces than are wanted, or in one where several are."""
    for place, want in wanted.items():
        node = at_place(section.tree, place)
        if isinstance(node, Pieces) and isinstance(want, Parts):
            boxes = [(section.leaves[n].starts, section.leaves[n].shape) for n in node.leaves]
            if node.shape == want.shape and boxes != [(leaf.starts, leaf.shape) for leaf in want.leaves]:
                return True
        elif isinstance(node, Pieces | Ref) and isinstance(node, Pieces) != isinstance(want, Parts):
            return True
    return False
