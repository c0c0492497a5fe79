"""Which bytes of one rank's snapshot another rank's, of the same step, holds as well: what need not be sent (M10).

Rule 1: what layouts say is a guess that saves sending. Whoever puts a copy together from another rank's bytes compares
the whole with its checksum, and has all of it sent where they differ: a plain tensor that is called a replica may not
be one (EXPERIMENTS C8), and memory may be written meanwhile.
Rule 2: alike are leaves of one name, type and rectangle of one tensor, of which both say that every rank holds it, or
that it is a shard: two ranks with one shard of one tensor are replicas (HSDP). What belongs to a rank alone never is.
Rule 3: what is small is sent: asking for its neighbours one by one would cost more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.checkpoint.core.layout import Layout, Leaf

LEAST = 4096
"""Bytes of a leaf that is worth leaving out."""

Range = tuple[int, int]
"""Begin and end."""


@dataclass(frozen=True, slots=True)
class Run:
    """So many bytes of our payload, from `at` on, are those of the other's from `source` on."""

    at: int
    source: int
    size: int


def shared(layout: Layout, least: int = LEAST) -> list[Leaf]:
    """Return the leaves that another rank may have as well."""
    return [leaf for leaf in layout.leaves() if leaf.nbytes >= least and _of_all(leaf)]


def alike(mine: Layout, theirs: Layout, least: int = LEAST) -> list[Run]:
    """Return the leaves of our payload that theirs has too, in order."""
    if mine.world_size != theirs.world_size:
        return []
    known = {leaf.path: leaf for leaf in shared(theirs, least)}
    found = [
        Run(leaf.offset, other.offset, leaf.nbytes)
        for leaf in shared(mine, least)
        if (other := known.get(leaf.path)) is not None and _same(leaf, other)
    ]
    return sorted(found, key=lambda run: run.at)


def lacking(had: Sequence[Range], begin: int, end: int) -> list[Range]:
    """Return what is left of [begin, end) without these ranges, which are sorted."""
    left: list[Range] = []
    for first, last in had:
        if first > begin:
            left.append((begin, min(first, end)))
        begin = max(begin, last)
    if begin < end:
        left.append((begin, end))
    return left


def _of_all(leaf: Leaf) -> bool:
    return not leaf.per_rank and leaf.alias_of is None and (leaf.replicated or leaf.global_shape is not None)


def _same(one: Leaf, other: Leaf) -> bool:
    return (
        one.replicated == other.replicated
        and (one.kind, one.dtype, one.nbytes, one.shape) == (other.kind, other.dtype, other.nbytes, other.shape)
        and (one.whole_shape, one.starts) == (other.whole_shape, other.starts)
    )
