"""Which tensors of a state overlap in memory, so that they will do so again when they are made anew.

Two views of one memory (a weight and its transpose, a window and the whole) are stored each for itself, since a reader
wants rows of bytes; a write through one of them must still be seen by the other after a restore. So each says in which
group of overlapping tensors it is, and where it begins in that group's memory. Tensors that lie beside each other
without overlapping (slices of a large buffer) are no group: their parent's other bytes are nobody's (CASES CS-17).

Rule 1: groups are the connected parts of the relation "these two extents overlap"; one alone is none.
Rule 2: what is said does not depend on where the memory lies, so two walks of one state agree to the byte: groups are
    counted in the order of their first members, and places are relative to the group's begin, rounded down so that
    every element type stays aligned.
"""

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNED = 16
"""Bytes of the largest element; a group's memory begins at a multiple of it."""

Share = tuple[int, int, int]
"""Number of the group, where the tensor begins in the group's memory, bytes of the group's memory."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes from a tensor's first element to its last."""

    leaf: int
    device: str
    begin: int
    end: int  # exclusive


def shared(extents: Iterable[Extent]) -> dict[int, Share]:
    """Return for each leaf that overlaps another how it lies in its group."""
    groups: list[list[Extent]] = []
    reach = 0
    for extent in sorted(extents, key=lambda e: (e.device, e.begin, e.end, e.leaf)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.device == extent.device and extent.begin < reach:
            groups[-1].append(extent)
            reach = max(reach, extent.end)
        else:
            groups.append([extent])
            reach = extent.end
    several = sorted((g for g in groups if len(g) > 1), key=lambda g: min(e.leaf for e in g))
    found: dict[int, Share] = {}
    for number, group in enumerate(several):
        begin = min(e.begin for e in group) // ALIGNED * ALIGNED
        size = max(e.end for e in group) - begin
        found |= {e.leaf: (number, e.begin - begin, size) for e in group}
    return found
