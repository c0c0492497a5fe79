"""What the checkpoint flags of `everstep run` come to."""

import pytest

from everstep.checkpoint import flags
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
    assert flags._keep({"checkpoint_keep": 2, **given}) == keep


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
        flags._keep({"checkpoint_keep": 2, **given})


def test_both_directories_from_flags_and_from_the_environment(monkeypatch):
    for name in ("DIR", "INTERVAL", "LOCAL_DIR", "LOCAL_INTERVAL"):
        monkeypatch.delenv(f"EVERSTEP_CHECKPOINT_{name}", raising=False)
    given = {"checkpoint_keep": 3}
    assert flags.places(given) == []
    main, local = flags.places({**given, "checkpoint_dir": "s3://b/p", "checkpoint_local_dir": "/nvme"})
    assert main == flags.Place("disk", "s3://b/p", 100, Keep(3))
    assert local == flags.Place("local", "/nvme", 10, Keep(2))
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_LOCAL_DIR", "/ssd")
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_LOCAL_INTERVAL", "7")
    assert flags.places(given) == [flags.Place("local", "/ssd", 7, Keep(2))]
    more = {"checkpoint_local_dir": "/x", "checkpoint_local_interval": 5, "checkpoint_local_keep": 4}
    assert flags.places({**given, **more}) == [flags.Place("local", "/x", 5, Keep(4))]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"checkpoint_dir": "x", "checkpoint_local_dir": "./x"}, "are one directory"),
        ({"checkpoint_local_dir": "s3://b/p"}, "give a directory of this node"),
        ({"checkpoint_local_dir": "x", "checkpoint_local_interval": 0}, "1 or more"),
        ({"checkpoint_local_dir": "x", "checkpoint_local_keep": 0}, "keep 1 or more"),
        ({"checkpoint_interval": -1}, "1 or more"),
    ],
)
def test_a_second_directory_that_cannot_be_meant_is_refused(given, why):
    with pytest.raises(UsageError, match=why):
        flags.places({"checkpoint_keep": 2, **given})
