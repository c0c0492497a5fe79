"""Which save a call is: the same on every rank, whatever each of them heard of earlier ones, and when."""

import itertools

import pytest

from everstep.checkpoint.core.numbering import Numbering

WAYS = ("takes", "raises", "raises and is called again", "raises twice")


def number_of(one, step, way):
    """Call for `step`; return the number that was taken with, or None."""
    for _ in range({"takes": 0, "raises twice": 2}.get(way, 1)):
        one.pass_over(step)
    return one.give(step) if way in ("takes", "raises and is called again") else None


@pytest.mark.parametrize("ways", list(itertools.product(WAYS, repeat=3)))
def test_ranks_that_make_the_same_calls_number_them_alike(ways):
    here, there = Numbering(), Numbering()
    for step, way in enumerate(ways, 7):
        assert number_of(here, step, way) in (number_of(there, step, "takes"), None)
        assert here.last == there.last == step - 6


def test_the_same_step_twice_is_two_saves():
    one = Numbering()
    assert [one.give(5), one.give(5), one.give(6)] == [1, 2, 3]


def test_a_step_that_comes_again_after_a_restore_is_another_save():
    here, there = Numbering(), Numbering()
    here.pass_over(9)
    there.give(9)
    for each in (here, there):
        each.rewound()
    assert here.give(9) == there.give(9) == 2
