"""What a real driver says of a real GPU: asked, not doubled."""

import datetime

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from everstep.inprocess import devices
from everstep.inprocess.exception import TimeoutError as CheckTimeout
from everstep.inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
)
from everstep.inprocess.state import FrozenState

pytestmark = pytest.mark.gpu


@pytest.fixture
def told(monkeypatch):
    """What was said once; empty where everything could be asked."""
    said: set[str] = set()
    monkeypatch.setattr(devices, "_told", said)
    return said


def test_the_driver_is_asked_for_its_recovery_action_and_wants_none(told):
    assert devices.gpu_trouble(0) == ""
    assert told == set(), "the driver was not asked"
    state = FrozenState(0, 1)
    assert ChainedGPUHealthCheck()(state) is state
    assert told == set()


def test_a_gpu_that_is_not_there_is_no_verdict(told):
    assert devices.gpu_trouble(97) == ""
    assert "refuses" in " ".join(told)


def test_the_links_are_asked_for(told):
    print("nvlinks:", devices.nvlink_trouble(0) or "none is down, or there is none", told)
    state = FrozenState(0, 1)
    assert ChainedNVLHealthCheck()(state) is ChainedNicHealthCheck()(state) is state


def test_a_device_that_does_not_finish_in_time_is_a_verdict_and_one_that_does_is_none():
    state = FrozenState(0, 1)
    check = CudaHealthCheck(datetime.timedelta(seconds=1))
    torch.ones(1, device="cuda")
    assert check(state) is state
    torch.cuda._sleep(8_000_000_000)  # over four seconds
    with pytest.raises(CheckTimeout, match="has not finished its work") as caught:
        check(state)
    assert "device 0" in str(caught.value)
    torch.cuda.synchronize()
    assert check(state) is state
