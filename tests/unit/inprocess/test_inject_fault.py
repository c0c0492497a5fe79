"""Faults on purpose: the same seed chooses alike everywhere; faults of one's own work (W54)."""

import threading

import pytest

from everstep.inprocess.tools import inject_fault as tool
from everstep.inprocess.tools.inject_fault import Fault


@pytest.fixture
def hurt(monkeypatch):
    """What would be injected on each rank of a world of eight."""

    def play(**arguments):
        found = {}
        for rank in range(8):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "8")
            monkeypatch.setattr(tool, "dispatch_fault_injection", lambda f, d, c, r=rank: found.setdefault(r, (f, d)))
            tool.inject_fault(**arguments)
        return found

    return play


def test_a_seed_chooses_ranks_fault_and_time_alike_on_all(hurt):
    settings = {"faults": (Fault.SIGKILL, Fault.LOCK_GIL), "num_faults": (2, 4), "keep_alive": 2, "delay": (1.0, 5.0)}
    for seed in range(20):
        found = hurt(**settings, seed=seed)
        assert found == hurt(**settings, seed=seed)
        assert 2 <= len(found) <= 4
        assert min(found) >= 2
        assert len(set(found.values())) == 1
    with pytest.raises(ValueError, match="lower num_faults or keep_alive"):
        hurt(**(settings | {"num_faults": 7}), seed=0)


def test_a_fault_of_ones_own_works():
    """W54: NVRx's `register_fault` of a name always raises TypeError."""
    done = []
    tool.register_fault("SLOW_DISK", lambda delay, callback: done.append((delay, callback)))
    tool.dispatch_fault_injection("SLOW_DISK", 2.0, None)
    assert done == [(2.0, None)]
    with pytest.raises(ValueError, match="register_fault adds others"):
        tool.dispatch_fault_injection("NO_SUCH", 0.0, None)


def test_what_is_due_in_the_loop_is_raised_there_once():
    called = threading.Event()
    tool.dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.0, called.set)
    assert called.wait(20)
    while not tool._workload:
        pass
    with pytest.raises(tool.InjectedException):
        tool.maybe_raise_workload_exception()
    tool.maybe_raise_workload_exception()
    tool._workload.append(tool.InjectedException())
    tool.clear_workload_exception()
    tool.maybe_raise_workload_exception()


def test_an_exception_from_outside_comes_into_the_main_thread():
    with pytest.raises(tool.InjectedException):  # noqa: PT012
        tool.dispatch_fault_injection(Fault.ASYNC_EXC, 0.0, None)
        while True:
            pass


def test_the_other_path_leads_to_the_same():
    from everstep.shared_utils import inject_fault

    assert inject_fault.inject_fault is tool.inject_fault
    assert inject_fault.Fault is Fault
