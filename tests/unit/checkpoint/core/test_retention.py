"""Retention: only what is complete counts (CS-31), the newest complete one never goes."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.core import retention
from everstep.checkpoint.core.retention import Keep
from everstep.errors import UsageError


def test_the_newest_two_stay_by_default():
    decision = retention.decide([20, 60, 40, 80])
    assert decision.remove == (20, 40)
    assert "step 60" in decision.reason


def test_none_keeps_all():
    assert retention.decide([20, 40, 60], None).remove == ()


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(keep):
    with pytest.raises(UsageError, match="keep 1 or more"):
        retention.decide([20], keep)


@pytest.mark.sample(100)
@pytest.mark.parametrize("seed", range(300))
def test_the_newest_complete_one_never_goes_and_no_newer_goes_before_an_older(seed):
    rng = random.Random(seed)
    steps, keep = rng.sample(range(1000), rng.randint(0, 12)), rng.choice([None, 1, 2, 5])
    removed = retention.decide(steps, keep).remove
    kept = set(steps) - set(removed)
    assert removed == tuple(sorted(removed))
    assert not steps or max(steps) in kept
    assert len(kept) == (len(steps) if keep is None else min(keep, len(steps)))
    assert not removed or max(removed) < min(kept)


STEPS = [100, 200, 300, 400, 500, 600]
LOSS = {100: {"loss": 3.0}, 200: {"loss": 0.5}, 300: {"loss": 2.0}, 400: {"loss": 0.5}, 500: {"other": 0.0}}


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Keep(1), [600]),
        (Keep(2), [500, 600]),
        (Keep(1, every=300), [300, 600]),
        (Keep(1, every=1), STEPS),
        (Keep(1, best=1, metric="loss"), [400, 600]),  # of equals the newer
        (Keep(1, best=2, metric="loss"), [200, 400, 600]),
        (Keep(1, best=1, metric="loss", mode="max"), [100, 600]),
        (Keep(1, best=9, metric="loss"), [100, 200, 300, 400, 600]),  # one that was not measured is none of the best
        (Keep(1, best=3, metric="nowhere"), [600]),
        (Keep(2, every=200, best=1, metric="loss", mode="max"), [100, 200, 400, 500, 600]),
        (Keep(None, every=7), STEPS),
        (None, STEPS),
        (1, [600]),
    ],
)
def test_what_stays_is_what_any_of_the_three_asks_for(keep, stay):
    decision = retention.decide(STEPS, keep, LOSS)
    assert sorted(set(STEPS) - set(decision.remove)) == stay
    assert decision.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_measure_that_is_no_number_is_none_of_the_best(value, mode):
    keep = Keep(1, best=1, metric="loss", mode=mode)
    assert retention.decide([1, 2, 3], keep, {1: {"loss": value}, 2: {"loss": 1.0}}).remove == (1,)


@pytest.mark.parametrize(
    "wrong",
    [{"last": 0}, {"last": -1}, {"every": 0}, {"best": 1}, {"metric": "loss"}, {"best": -1, "metric": "loss"},
     {"best": 1, "metric": "loss", "mode": "least"}],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        Keep(**wrong)


@given(
    steps=st.sets(st.integers(0, 10_000), max_size=30),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 50),
    best=st.integers(0, 4),
    mode=st.sampled_from(["min", "max"]),
    data=st.data(),
)
def test_the_newest_never_goes_and_nothing_goes_that_is_asked_for(steps, last, every, best, mode, data):
    known = data.draw(st.dictionaries(st.sampled_from(sorted(steps)), st.floats(), max_size=30)) if steps else {}
    keep = Keep(last, every, best, "m" if best else "", mode)
    metrics = {step: {"m": value} for step, value in known.items()}
    decision = retention.decide(steps, keep, metrics)
    kept = steps - set(decision.remove)
    assert list(decision.remove) == sorted(set(decision.remove) & steps)
    assert set(sorted(steps)[-last:]) <= kept
    assert all(step in kept for step in steps if every and step % every == 0)
    extra = kept - set(sorted(steps)[-last:]) - {s for s in steps if every and s % every == 0}
    assert len(extra) <= best
    for step in extra:
        worse = [v for s, v in known.items() if s in decision.remove and math.isfinite(v)]
        assert all(known[step] <= v if mode == "min" else known[step] >= v for v in worse)
    assert retention.decide(kept, keep, metrics).remove == ()  # what is left is left alone
