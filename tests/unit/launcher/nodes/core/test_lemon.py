"""When a node is a bad one, and whether the others can do without it."""

import pytest

from everstep.launcher.nodes.core.lemon import Lemon, spared


def test_so_many_generations_within_so_long():
    lemon = Lemon(3, 100.0)
    assert not lemon.fault(0, 0.0)
    assert not lemon.fault(0, 1.0), "a better cause of the same"
    assert not lemon.fault(1, 50.0)
    assert not lemon.fault(2, 100.1), "the first is too long ago"
    assert lemon.fault(5, 120.0)
    assert str(lemon) == "3 faults of its ranks within 100 s"


def test_none_makes_a_lemon_where_that_is_not_wished():
    lemon = Lemon(0)
    assert not any(lemon.fault(generation, 0.0) for generation in range(50))


@pytest.mark.parametrize(
    ("present", "leaving", "ranks", "allowed"),
    [(3, 0, 4, True), (3, 1, 4, False), (2, 0, 4, False), (2, 0, 2, True), (2, 0, 3, False), (1, 0, 0, True)],
)
def test_never_below_the_fewest_ranks_that_the_job_goes_on_with(present, leaving, ranks, allowed):
    assert spared(present, leaving, ranks, 2) is allowed
