"""The flags of copies on other nodes: what they mean, and what cannot be meant."""

import argparse

import pytest

from everstep.checkpoint.peer_flags import Copies, add_run_arguments, copies_of, idle
from everstep.errors import UsageError


def given(*words):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return vars(parser.parse_args(words))


def test_left_out_they_keep_one_copy_of_every_step_and_on_one_node_nothing_is_said_of_it():
    assert copies_of(given()) == Copies(1, 1, "", asked=False)
    assert idle(copies_of(given())) is None


@pytest.mark.parametrize(
    "words",
    [("--checkpoint-peer-interval", "10"), ("--checkpoint_peer_copies", "2"), ("--failure-domain", "rack-7")],
)
def test_on_one_node_it_is_said_that_nobody_is_there(words):
    assert "nobody is there to keep copies" in (idle(copies_of(given(*words))) or "")


def test_what_they_say():
    words = ("--checkpoint-peer-interval", "5", "--checkpoint-peer-copies", "2", "--failure-domain", "r1")
    assert copies_of(given(*words)) == Copies(5, 2, "r1", asked=True)


def test_none_are_kept_at_0():
    assert copies_of(given("--checkpoint-peer-interval", "0")).interval == 0
    assert idle(copies_of(given("--checkpoint-peer-interval", "0"))) is None


@pytest.mark.parametrize("flag", ["interval", "copies"])
def test_less_than_none_cannot_be_meant(flag):
    with pytest.raises(UsageError, match="0 or more"):
        copies_of(given(f"--checkpoint-peer-{flag}", "-1"))
