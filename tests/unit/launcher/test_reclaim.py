"""The look at a device before the next attempt, with a driver of ours in NVML's place."""

import os
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

from everstep.launcher import reclaim
from everstep.process import mark


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """One GPU, of which `used` and `processes` are told; `hangs` never answers."""
    nvml = ModuleType("pynvml")
    nvml.used, nvml.processes, nvml.asked, nvml.hangs = [0], [], tmp_path / "asked", False
    nvml.nvmlMemory_v2 = 2

    def begin():
        if nvml.hangs:
            signal.pause()

    def by_index(index):
        nvml.asked.write_text(str(index))
        return index

    def memory(handle, version):
        assert version == 2
        return SimpleNamespace(used=nvml.used.pop(0) if len(nvml.used) > 1 else nvml.used[0])

    nvml.nvmlInit, nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetMemoryInfo = begin, by_index, memory
    nvml.nvmlDeviceGetHandleByUUID = by_index
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: nvml.processes
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(reclaim, "DRIVER", tmp_path)
    return nvml


def wait(limit_s=50.0, environment=(), job="a-job"):
    return reclaim.wait((limit_s, 512), 0, dict(environment), job)


def test_a_machine_without_a_device_is_not_asked(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(reclaim, "DRIVER", tmp_path / "none")
    assert wait() == ""
    assert not driver.asked.exists()


def test_a_limit_of_0_does_not_look(driver):
    assert wait(0.0) == ""
    assert not driver.asked.exists()


@pytest.mark.parametrize(("listed", "asked"), [("", "0"), ("3,1", "3"), ("GPU-ab,GPU-cd", "GPU-ab")])
def test_the_device_is_the_one_that_the_rank_will_see(driver, listed, asked):
    assert wait(environment={"CUDA_VISIBLE_DEVICES": listed}) == ""
    assert driver.asked.read_text() == asked


def test_what_is_being_freed_is_waited_for(driver):
    driver.used[:] = [90 << 30, 50 << 30, 10 << 30, 0]
    assert wait() == ""


def test_a_stranger_is_named(driver):
    driver.used[:] = [4 << 30]
    driver.processes = [SimpleNamespace(pid=os.getppid(), usedGpuMemory=4 << 30)]
    assert f"GPU 0 still has 4096 MiB taken by pid {os.getppid()} (" in wait()


def test_a_rank_of_this_job_is_none(driver, monkeypatch):
    monkeypatch.setattr(mark, "of", lambda pid: {mark.JOB: "a-job"})
    driver.used[:] = [4 << 30]
    driver.processes = [SimpleNamespace(pid=os.getppid(), usedGpuMemory=None)]
    assert wait() == ""


def test_a_driver_that_does_not_answer_is_told_of_and_nothing_is_left(driver):
    driver.hangs = True
    assert wait(0.2).startswith("the NVIDIA driver has not answered within 1.2 s")
    pid, status = os.waitpid(-1, 0)
    assert os.waitstatus_to_exitcode(status) == -9, pid


def test_a_device_that_is_not_there_says_nothing(driver):
    def none(index):
        raise RuntimeError("not found")

    driver.nvmlDeviceGetHandleByIndex = none
    assert wait() == ""


def test_one_that_has_told_and_does_not_end_is_waited_for_no_longer(driver, monkeypatch):
    """Its memory is given back in its exit, by the driver: there it may stand for ever."""
    monkeypatch.setattr(reclaim, "END_S", 0.1)
    monkeypatch.setattr(reclaim.os, "_exit", lambda code: signal.pause())
    assert wait() == ""
    pid, status = os.waitpid(-1, 0)
    assert os.waitstatus_to_exitcode(status) == -9, pid
