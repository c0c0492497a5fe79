"""An unwrapped script that fails again and again at one place is not begun again at once."""

import pytest

from everstep.recovery.core.policy import MOST_PAUSE_S, pause_s
from everstep.recovery.core.words import Fault, Policy

DEAF = Policy(world_size=2, max_restarts=100, deaf=True)


def raised(text="ValueError: x", rank=1):
    return "exception", text, rank


def pause(*faults, lives=None, policy=DEAF):
    made = [Fault(n, kind, "", None, rank, text=text) for n, (kind, text, rank) in enumerate(faults)]
    return pause_s(policy, made, dict(enumerate(lives or [5.0] * len(made))))


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 1.0), (3, 2.0), (4, 4.0), (6, 16.0), (50, MOST_PAUSE_S)])
def test_each_repetition_doubles_the_pause(count, expected):
    assert pause(*[raised()] * count) == expected


@pytest.mark.parametrize(
    ("faults", "lives"),
    [
        ([raised(), raised("ValueError: y")], None),
        ([raised(), ("death", "ended with status 1", 1)], None),
        ([("death", "ended with status 1", 1), ("death", "ended with status 2", 1)], None),
        ([("death", "ended with status 1", 0), ("death", "ended with status 1", 1)], None),
        ([("death", "ended by signal 9", 1)] * 2, None),
        ([("stall", "", 1)] * 2, None),
        ([raised()] * 2, [5.0, 3600.0]),
    ],
)
def test_what_repeats_nothing_is_not_put_off(faults, lives):
    assert pause(*faults, lives=lives) == 0.0


def test_who_tells_of_what_all_raise_does_not_matter_and_a_segfault_repeats_on_its_rank():
    assert pause(raised(rank=0), raised(rank=1)) == 1.0
    assert pause(*[("death", "ended by signal 11", 1)] * 2) == 1.0
    assert pause(*[raised()] * 2, lives=[1000.0, 1150.0]) == 1.0


def test_numbers_in_what_is_said_tell_no_two_exceptions_apart():
    said = [raised(f"RuntimeError: step {n}, pid {4000 + 7 * n}: bad tensor at 0x7f{n}a") for n in range(3)]
    assert pause(*said) == 2.0


def test_an_interrupted_row_begins_anew_and_a_wrapped_job_has_no_pause():
    assert pause(raised(), raised(), raised("other"), raised()) == 0.0
    assert pause(*[raised()] * 3, policy=Policy(world_size=2, max_restarts=100)) == 0.0
    assert pause() == 0.0
