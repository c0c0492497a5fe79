"""What the flags of `everstep run` come to."""

import pytest

from everstep import wiring
from everstep.checkpoint.core.retention import Keep
from everstep.errors import UsageError


@pytest.mark.parametrize(
    ("given", "keep"),
    [
        ({}, Keep(2)),
        ({"checkpoint_keep_every": 1000}, Keep(2, every=1000)),
        ({"checkpoint_keep_best": 3, "checkpoint_metric": "loss"}, Keep(2, best=3, metric="loss")),
        ({"checkpoint_keep_best": 1, "checkpoint_metric": "bleu:max"}, Keep(2, best=1, metric="bleu", mode="max")),
    ],
)
def test_what_is_kept_is_what_the_flags_say(given, keep):
    assert wiring._keep({"checkpoint_keep": 2, **given}) == keep


@pytest.mark.parametrize(
    "given",
    [
        {"checkpoint_keep_best": 3},
        {"checkpoint_metric": "loss"},
        {"checkpoint_keep_every": 0},
        {"checkpoint_keep_best": 1, "checkpoint_metric": "loss:least"},
        {"checkpoint_keep": 0},
    ],
)
def test_flags_that_cannot_be_meant_are_refused(given):
    with pytest.raises(UsageError):
        wiring._keep({"checkpoint_keep": 2, **given})
