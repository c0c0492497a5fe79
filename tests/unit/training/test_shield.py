"""Signals that Slurm sends to every process of a step: which of them a rank lets pass it by, and who else does not."""

import os
import signal

import pytest

from everstep.training.shield import SIGNALS, shielded


@pytest.fixture
def in_a_step(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_rank_lives_on_and_a_child_of_its_dies_as_ever(in_a_step, number):
    with shielded():
        os.kill(os.getpid(), number)
        child = os.fork()
        if not child:
            os.kill(os.getpid(), number)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_handler_of_the_script_s_own_is_left_alone(in_a_step):
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    with shielded():
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGTERM, lambda *_: heard.append(2))
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [1, 2]


def test_elsewhere_nothing_is_changed(in_a_step, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_ID")
    with shielded():
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL]
