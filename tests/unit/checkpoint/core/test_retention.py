"""Retention: only what is complete counts (CS-31), the newest complete one never goes."""

import random

import pytest

from everstep.checkpoint.core import retention
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
