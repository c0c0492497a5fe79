"""A stretch of a tensor's elements, counted row by row, as the rectangles that it is made of.

FSDP1 lays parameters one behind the other in one flat parameter and cuts that, wherever a cut may fall: what a rank
holds of a parameter is a range of its elements. DCP, and every reader that reshards, knows rectangles. A range of a
tensor of d dimensions is at most 2d-1 of them (EXPERIMENTS C7), whose elements lie one behind the other in the range:

    rows of a 4 x 5 matrix, range 3…16      . . . a a     a: the rest of a row begun before
                                            b b b b b     b: whole rows
                                            b b b b b
                                            c c . . .     c: the beginning of a row

Rule 1: the rectangles come in the order of their elements, so the n-th begins where the one before it ended.
Rule 2: together they are the range, and none is empty: ranges that tile a tensor give rectangles that tile it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of its elements."""
        return prod(self.sizes)


def rectangles(shape: Sequence[int], start: int, stop: int) -> tuple[Rectangle, ...]:
    """Return the rectangles of the elements `start` to `stop` (exclusive) of a tensor of that shape.

    Raises ValueError for a range that is not one of the tensor's.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} are no range of a tensor of shape {list(shape)}")
    return tuple(Rectangle(o, s) for o, s in _cut(tuple(shape), start, stop)) if start < stop else ()


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _cut(shape: tuple[int, ...], start: int, stop: int) -> list[_Box]:
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = start // row, stop // row  # rows that hold the first element, and the first one behind the range
    if first == last:
        return _in_row(shape, first, start - first * row, stop - first * row)
    found: list[_Box] = []
    if start % row:
        found += _in_row(shape, first, start % row, row)
        first += 1
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if stop % row:
        found += _in_row(shape, last, 0, stop % row)
    return found


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[_Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in _cut(shape[1:], start, stop)]
