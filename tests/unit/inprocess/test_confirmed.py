"""A bad sample is no verdict (HD-11): a check that fails once, twice, now and then, always; that hangs."""

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")

from everstep.errors import UsageError
from everstep.inprocess.exception import HealthCheckError
from everstep.inprocess.health_check import Confirmed, HealthCheck
from everstep.inprocess.state import FrozenState
from everstep.inprocess.wrap import STOP_S, Wrapper

STATE = FrozenState(3, 4)


class Samples(HealthCheck):
    """Bad as a pattern says, sample by sample; then good."""

    def __init__(self, bad):
        self.bad, self.looks = list(bad), 0

    def __call__(self, state):
        self.looks += 1
        if self.bad and self.bad.pop(0):
            raise ConnectionError(f"link down, sample {self.looks}")
        return state


class Pauses:
    def __init__(self):
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)


@pytest.mark.parametrize(("bad", "looks"), [([], 1), ([1], 2), ([1, 1], 3), ([0, 1, 1, 1], 1)])
def test_what_passes_in_the_end_passes(bad, looks):
    check, clock = Samples(bad), Pauses()
    assert Confirmed(check, pause=timedelta(seconds=2), clock=clock)(STATE) is STATE
    assert check.looks == looks
    assert clock.slept == [2.0] * (looks - 1)


def test_every_other_sample_bad_never_ends_a_rank():
    check = Samples([1, 0] * 10)
    confirmed = Confirmed(check, times=2, clock=Pauses())
    for _ in range(10):
        assert confirmed(STATE) is STATE


def test_what_fails_each_time_is_told_with_its_last_words():
    check = Samples([1] * 10)
    with pytest.raises(HealthCheckError, match=r"rank 3: 3 times in a row, the last: ConnectionError: .*sample 3"):
        Confirmed(check, clock=Pauses())(STATE)
    assert check.looks == 3


def test_a_check_that_hangs_is_left_alone():
    never = threading.Event()

    class Hangs(HealthCheck):
        def __call__(self, state):
            never.wait()
            return state

    with pytest.raises(HealthCheckError, match=r"2 times in a row, the last: not done within 0:00:00.01"):
        Confirmed(Hangs(), times=2, timeout=timedelta(milliseconds=10), clock=Pauses())(STATE)
    never.set()


def test_leaving_an_iteration_may_take_as_long_as_its_looks():
    twice = Confirmed(Samples([]), times=2, pause=timedelta(seconds=3), timeout=timedelta(seconds=20))
    assert twice.most_s == 43
    assert Wrapper(health_check=twice).wishes()["stop_s"] == STOP_S + 43


def test_once_is_the_least():
    with pytest.raises(UsageError, match="give 1 or more"):
        Confirmed(Samples([]), times=0)
