"""Which bytes of one row-major array go where in another, when a rectangle is copied between them.

Rule 1: bytes that lie side by side in both are one run: a cut along the first dimension is one copy.
Rule 2: runs come in the order of both arrays, so a source can be read once from front to back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Run:
    """So many bytes, from here to there."""

    start: int
    to: int
    count: int


def runs(
    source: Sequence[int], start: Sequence[int], target: Sequence[int], into: Sequence[int], sizes: Sequence[int],
    item: int,
) -> Iterator[Run]:  # fmt: skip
    """Yield the runs of a rectangle of `sizes` elements of `item` bytes: at `start` in an array of shape `source`, at
    `into` in one of shape `target`.
    """
    if not prod(sizes):
        return
    split = _split(source, target, sizes)
    from_strides, to_strides = _strides(source, item), _strides(target, item)
    count = prod(sizes[split:]) * item
    first = _dot(start, from_strides), _dot(into, to_strides)
    for place in product(*map(range, sizes[:split])):
        yield Run(first[0] + _dot(place, from_strides), first[1] + _dot(place, to_strides), count)


def contiguous(
    source: Sequence[int], start: Sequence[int], target: Sequence[int], into: Sequence[int], sizes: Sequence[int],
    item: int,
) -> Run | None:  # fmt: skip
    """Return the one run that the rectangle is, or None where it is several."""
    if prod(sizes[: _split(source, target, sizes)]) != 1:
        return None
    return next(runs(source, start, target, into, sizes, item), Run(0, 0, 0))


def _split(source: Sequence[int], target: Sequence[int], sizes: Sequence[int]) -> int:
    """The first dimension from which on a run holds all: every later one is full on both sides."""
    split = len(sizes)
    while split and (split == len(sizes) or (sizes[split] == source[split] == target[split])):
        split -= 1
    return split


def _strides(shape: Sequence[int], item: int) -> list[int]:
    return [item * prod(shape[n + 1 :]) for n in range(len(shape))]


def _dot(place: Sequence[int], strides: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(place, strides, strict=False))
