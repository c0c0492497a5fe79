"""A node's own check before it joins."""

import pytest

from everstep.errors import BadNode
from everstep.launcher.fitness import check


def test_a_check_that_passes_says_nothing():
    check("echo all is well")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo one; echo device 3 is lost >&2; exit 4", r"ended with 4 \(device 3 is lost\)\.$"),
        ("exit 1", r"ended with 1\.$"),
        ("no-such-command-of-ours", r"ended with 127 \(.*not found\)\.$"),
        ("kill -9 $$", r"ended by signal 9\.$"),
    ],
)
def test_one_that_fails_is_told_with_its_last_words_and_is_code_75(command, said):
    with pytest.raises(BadNode, match=said) as refused:
        check(command)
    assert refused.value.exit_code == 75


def test_one_that_does_not_end_is_ended_with_what_it_started():
    with pytest.raises(BadNode, match=r"has not ended in 0.3 s"):
        check("sleep 1000 & sleep 1000", 0.3)
