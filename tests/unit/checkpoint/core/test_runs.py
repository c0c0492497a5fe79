"""Copies between row-major arrays: every element of the rectangle, and no other byte, in as few runs as can be."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.core.runs import Run, contiguous, runs

ITEM = 2


def numbered(shape):
    return {place: n for n, place in enumerate(itertools.product(*map(range, shape)))}


@st.composite
def copies(draw):
    dims = draw(st.integers(0, 4))
    sizes = [draw(st.integers(0, 4)) for _ in range(dims)]
    before = [[draw(st.integers(0, 3)) for _ in range(dims)] for _ in range(2)]
    after = [[draw(st.integers(0, 2)) for _ in range(dims)] for _ in range(2)]
    shapes = [[b + s + a for b, s, a in zip(before[n], sizes, after[n], strict=True)] for n in range(2)]
    return shapes[0], before[0], shapes[1], before[1], sizes


@settings(deadline=None)
@given(copies())
def test_a_rectangle_goes_where_it_belongs_and_nothing_else(copy):
    source, start, target, into, sizes = copy
    there, here = numbered(source), numbered(target)
    content = bytes(itertools.chain.from_iterable((n % 251, n // 251 + 1) for n in there.values()))
    made = bytearray(len(here) * ITEM)
    for run in runs(source, start, target, into, sizes, ITEM):
        made[run.to : run.to + run.count] = content[run.start : run.start + run.count]
    expected = bytearray(len(made))
    for place in itertools.product(*map(range, sizes)):
        a = there[tuple(p + s for p, s in zip(place, start, strict=True))] * ITEM
        b = here[tuple(p + s for p, s in zip(place, into, strict=True))] * ITEM
        expected[b : b + ITEM] = content[a : a + ITEM]
    assert made == expected
    found = list(runs(source, start, target, into, sizes, ITEM))
    one = contiguous(source, start, target, into, sizes, ITEM)
    assert one == (found[0] if len(found) == 1 else Run(0, 0, 0) if not found else None) or (one is None and not found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (((8, 3), (2, 0), (4, 3), (1, 0), (3, 3)), [Run(12, 6, 18)]),  # rows are one run
        (((2, 6), (0, 3), (2, 3), (0, 0), (2, 3)), [Run(6, 0, 6), Run(18, 6, 6)]),  # columns one for each row
        (((5,), (1,), (9,), (4,), (2,)), [Run(2, 8, 4)]),
        (((), (), (), (), ()), [Run(0, 0, 2)]),
        (((0, 3), (0, 0), (0, 3), (0, 0), (0, 3)), []),
    ],
)
def test_what_lies_side_by_side_is_one_run(arguments, expected):
    assert list(runs(*arguments, ITEM)) == expected
