"""The plan is a pure function, and its rules hold for every seed."""

import math
from collections import Counter
from itertools import pairwise

import pytest

from everstep.errors import UsageError
from everstep.faults.core.plan import (
    GAP,
    INSIDE,
    MARGIN,
    MOST,
    POSITIONS,
    TYPES,
    Plan,
    PlannedFault,
    Spec,
    most_that_fit,
    plan,
)

AWS = ("exception", "hang", "sigkill")


def made(seed=0, count=5, types=AWS, weights=(), world=2, steps=200) -> Plan:
    return plan(seed, count, types, weights, world, steps)


def test_golden():
    """A change here changes every run that was ever described by its flags."""
    assert [(f.step, f.rank, f.type, f.position) for f in made(seed=42).faults] == GOLDEN
    assert [
        (f.step, f.rank, f.type, f.position) for f in made(7, 3, ("hang", "gil"), (0.9, 0.1), 64, 2000).faults
    ] == GOLDEN_LARGE


GOLDEN = [
    (25, 1, "exception", "forward"),
    (70, 0, "sigkill", "boundary"),
    (102, 0, "exception", "optimizer"),
    (124, 1, "hang", "optimizer"),
    (177, 1, "hang", "backward"),
]
GOLDEN_LARGE = [(65, 0, "gil", "backward"), (820, 62, "hang", "forward"), (1812, 63, "hang", "optimizer")]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 12])
def test_rules_hold_for_every_seed(world, count):
    steps = 60
    for seed in range(60):
        faults = made(seed, count, AWS, (), world, steps).faults
        at = [f.step for f in faults]
        assert len(faults) == count
        assert [f.index for f in faults] == list(range(count))
        assert all(MARGIN < step <= steps - MARGIN for step in at)
        assert all(b - a >= GAP for a, b in pairwise(at))
        assert {f.rank for f in faults} <= set(range(world))
        assert {f.position for f in faults} <= set(POSITIONS)
        if count >= 2:
            assert 0 in {f.rank for f in faults}
        if count >= 3:
            assert set(INSIDE) <= {f.position for f in faults}
            assert {f.type for f in faults} == set(AWS)
        if count >= world:
            assert {f.rank for f in faults} == set(range(world))


def test_every_step_that_may_be_hit_is_hit_by_some_seed():
    hit = {f.step for seed in range(400) for f in made(seed, 3, steps=30).faults}
    assert hit == set(range(1 + MARGIN, 30 - MARGIN + 1))


def test_spread_over_the_run():
    """Each stratum has its own fault: the longest stretch without one is under two strata."""
    for seed in range(100):
        at = [0, *(f.step for f in made(seed, 10, steps=1000).faults), 1000]
        assert max(b - a for a, b in pairwise(at)) <= 2 * 1000 / 10 + 2 * GAP


@pytest.mark.parametrize(("weights", "low", "high"), [((3, 2), (6, 4), (6, 4)), ((1, 2), (3, 6), (4, 7))])
def test_types_come_their_expected_number_of_times(weights, low, high):
    for seed in range(100):
        seen = Counter(f.type for f in made(seed, 10, ("exception", "hang"), weights).faults)
        assert low[0] <= seen["exception"] <= high[0]
        assert low[1] <= seen["hang"] <= high[1]


def test_weight_zero_means_never_and_a_single_fault_is_drawn_by_weight():
    assert all(f.type != "hang" for seed in range(100) for f in made(seed, 5, AWS, (1, 0, 1)).faults)
    seen = Counter(made(seed, 1, ("exception", "hang"), (3, 1)).faults[0].type for seed in range(1000))
    assert 650 < seen["exception"] < 850


def test_seeds_differ_and_so_do_opposite_ones():
    assert len({made(seed).faults for seed in range(-50, 50)}) == 100


@pytest.mark.parametrize("steps", range(1, 40))
def test_exactly_as_many_fit_as_are_said_to(steps):
    most = most_that_fit(steps)
    assert len(made(3, most, steps=steps).faults) == most
    with pytest.raises(UsageError, match=f"at most {most} do.*Train for more steps"):
        made(3, most + 1, steps=steps)


@pytest.mark.parametrize(
    ("change", "mend"),
    [
        ({"types": ("exception", "meteor")}, "'meteor' is not known; choose from exception, memory"),
        ({"types": ()}, "choose from exception"),
        ({"types": ("hang", "hang")}, "greater weight"),
        ({"weights": (1, 2)}, "2 weights for 3 types.*one weight a type"),
        ({"weights": (1, -2, 1)}, "0 or greater"),
        ({"weights": (1, math.nan, 1)}, "finite"),
        ({"weights": (0, 0, 0)}, "give one a weight above 0"),
        ({"count": -1}, "0 to"),
        ({"count": MOST + 1}, f"0 to {MOST}"),
        ({"world": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, mend):
    with pytest.raises(UsageError, match=mend):
        made(**change)


def test_a_run_of_no_steps_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        Spec(1, steps=0)


def test_every_type_says_what_it_does():
    assert all(TYPES.values())
    assert PlannedFault(0, 1, 0, "hang", "forward") < PlannedFault(1, 1, 0, "hang", "forward")
