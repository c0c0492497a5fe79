"""A range of a tensor's elements is rectangles: all of it, once, in order, and few of them (EXPERIMENTS C7)."""

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.core.rectangles import rectangles


def numbers(shape, box) -> list[int]:
    """The elements of a box, counted row by row in the whole, in the box's own order."""
    steps = [prod(shape[d + 1 :]) for d in range(len(shape))]
    places = product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))
    return [sum(i * step for i, step in zip(place, steps, strict=True)) for place in places]


shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@given(st.data(), shapes)
def test_the_rectangles_are_the_range_in_order(data, shape):
    whole = prod(shape)
    start = data.draw(st.integers(0, whole))
    stop = data.draw(st.integers(start, whole))
    boxes = rectangles(shape, start, stop)
    assert [n for box in boxes for n in numbers(shape, box)] == list(range(start, stop))
    assert all(box.count > 0 for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data(), shapes)
def test_ranges_that_tile_a_tensor_give_rectangles_that_tile_it(data, shape):
    cuts = sorted(data.draw(st.lists(st.integers(0, prod(shape)), max_size=6)))
    edges = [0, *cuts, prod(shape)]
    found = [n for a, b in pairwise(edges) for x in rectangles(shape, a, b) for n in numbers(shape, x)]
    assert found == list(range(prod(shape)))


def test_the_picture():
    boxes = rectangles((4, 5), 3, 17)
    assert [(b.offsets, b.sizes) for b in boxes] == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert [(b.offsets, b.sizes) for b in rectangles((), 0, 1)] == [((), ())]
    assert rectangles((3, 0), 0, 0) == ()
    assert len(rectangles((3, 3, 3), 1, 26)) == 5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 21)])
def test_what_is_no_range_is_refused(start, stop):
    with pytest.raises(ValueError, match=r"no range of a tensor of shape \[4, 5\]"):
        rectangles((4, 5), start, stop)


def test_sizes_beyond_four_gigabytes_are_plain_arithmetic():
    rows = 1 << 33
    boxes = rectangles((rows, 3), rows, 2 * rows + 1)
    assert sum(box.count for box in boxes) == rows + 1
    assert boxes[0].offsets == (rows // 3, rows % 3)
