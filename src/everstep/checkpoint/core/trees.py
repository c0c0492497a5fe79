"""Questions about the trees of sections: what leaves stand in one, and in what two of them differ."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from everstep.checkpoint.core.items import walk
from everstep.checkpoint.core.layout import Node, Pieces, Ref, Section, printed

_SHOWN = 60


def difference(ranks: Sequence[Section]) -> str | None:
    """Say where the plain values of sections differ; None where they agree, and their leaves have the same names."""
    first = ranks[0]
    names = [leaf.path for leaf in first.leaves]
    text = printed(first.tree)
    for n, section in enumerate(ranks[1:], 1):
        if [leaf.path for leaf in section.leaves] != names or printed(section.tree) != text:
            return _where(first.tree, section.tree, first.name, n) or f"{first.name} differs between ranks 0 and {n}"
    return None


def _where(one: Node, other: Node, path: str, rank: int) -> str | None:
    """The first place in which two trees differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return _where_in_dicts(one, other, path, rank)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            if (found := _where(a, b, f"{path}/{n}", rank)) is not None:
                return found
        return None
    if printed(one) != printed(other):
        return f"{path} is {_short(one)} on rank 0 and {_short(other)} on rank {rank}"
    return None


def _where_in_dicts(one: dict[Any, Node], other: dict[Any, Node], path: str, rank: int) -> str | None:
    for key in dict.fromkeys([*one, *other]):
        if key not in one or key not in other:
            there, lacking = (rank, 0) if key in other else (0, rank)
            return f"{path}/{key} is there on rank {there} and not on rank {lacking}"
        if (found := _where(one[key], other[key], f"{path}/{key}", rank)) is not None:
            return found
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def mapped(node: Node, of: Callable[[Ref], Node]) -> Node:
    """The tree with something else in the place of each leaf."""
    if isinstance(node, Ref):
        return of(node)
    if type(node) in (dict, OrderedDict, Counter):
        return type(node)({key: mapped(value, of) for key, value in node.items()})
    if type(node) in (list, tuple):
        return type(node)(mapped(value, of) for value in node)
    return deque((mapped(value, of) for value in node), node.maxlen) if type(node) is deque else node


def in_pieces(node: Node) -> bool:
    """True where a tensor of the tree is told in pieces."""
    return any(isinstance(end, Pieces) for _, end in walk(node))


def refs(node: Node) -> Iterator[Ref]:
    """All leaves that stand in a tree."""
    if isinstance(node, Ref):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from refs(value)
    elif isinstance(node, list | tuple | deque):
        for value in node:
            yield from refs(value)


def contains(node: Node, keys: Set[str]) -> bool:
    """True where a dict with all of those keys stands in the tree."""
    if isinstance(node, dict):
        return node.keys() >= keys or any(contains(value, keys) for value in node.values())
    return isinstance(node, list | tuple) and any(contains(value, keys) for value in node)


def without(node: Node, keys: Set[str], found: list[int]) -> Node:
    """The tree with those keys' numbers taken out, which are put into `found`."""
    if isinstance(node, dict):
        found += [value for key, value in node.items() if key in keys and isinstance(value, int)]
        return {k: None if k in keys and isinstance(v, int) else without(v, keys, found) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [without(value, keys, found) for value in node]
    return node


def seeded(node: Node, keys: Set[str], seed: Callable[[str], int]) -> Node:
    """The tree with other numbers under those keys."""
    if type(node) in (dict, OrderedDict):
        return type(node)(
            (k, seed(k) if k in keys and isinstance(v, int) else seeded(v, keys, seed)) for k, v in node.items()
        )
    if type(node) in (list, tuple):
        return type(node)(seeded(value, keys, seed) for value in node)
    return node
