"""The callbacks and what they are told: states, checks, controllers, lines for an outer restarter."""

import dataclasses
import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")

from everstep import environ
from everstep.errors import ConfigurationError
from everstep.inprocess import (
    attribution,
    bounded,
    devices,
    exception,
    finalize,
    health_check,
    initialize,
    nested_restarter,
    rank_filter,
)
from everstep.inprocess.compose import Compose
from everstep.inprocess.state import FrozenState, Mode, State


class Uncopyable(Exception):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def test_a_frozen_state_holds_the_exception_itself():
    """W20: freezing copies nothing, so an exception that cannot be copied is no fault of its own."""
    state = State(1, 4, fn_exception=Uncopyable("x"))
    frozen = state.freeze()
    assert frozen.fn_exception is state.fn_exception
    assert dataclasses.asdict(FrozenState(1, 4)) == dataclasses.asdict(State(1, 4).freeze())
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.rank = 2
    state.advance()
    assert (state.iteration, state.fn_exception) == (1, None)
    other = State(0, 1)
    other.copy_from(frozen, ["rank", "world_size"])
    assert (other.rank, other.world_size, other.fn_exception) == (1, 4, None)
    other.copy_from(frozen)
    assert other.fn_exception is frozen.fn_exception


def test_a_rank_in_reserve_writes_no_text_none(monkeypatch):
    """NVRx writes the text None into RANK."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    State(3, 4, active_rank=None, active_world_size=2).set_distributed_vars()
    assert environ.get("RANK") == "3"
    State(3, 4, active_rank=1, active_world_size=2).set_distributed_vars()
    assert (environ.get("RANK"), environ.get("WORLD_SIZE")) == ("1", "2")
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigurationError, match="RANK is not set, but WORLD_SIZE is"):
        State.from_env()


def test_a_retry_controller_names_both_numbers():
    """W19, W21: the reason is in the exception."""
    control = initialize.RetryController(max_iterations=3, min_world_size=2, min_active_world_size=2)
    state = FrozenState(0, 4, active_world_size=4, iteration=2)
    assert control(state) is state
    with pytest.raises(exception.RestartAbort, match=r"iteration 3 would begin.*max_iterations=3"):
        control(FrozenState(0, 4, active_world_size=4, iteration=3))
    with pytest.raises(exception.RestartAbort, match=r"world_size is 1.*at least 2"):
        control(FrozenState(0, 1, active_world_size=1))
    with pytest.raises(exception.RestartAbort, match=r"active_world_size is 1.*at least 2"):
        control(FrozenState(0, 4, active_world_size=1))
    assert not issubclass(exception.RestartAbort, Exception)


def test_a_fault_counter_counts_what_this_process_raised():
    count = health_check.FaultCounter(max_rank_faults=1)
    well, ill = FrozenState(2, 4), FrozenState(2, 4, fn_exception=ValueError("boom"))
    assert [count(well), count(ill), count(well)] == [well, ill, well]
    with pytest.raises(health_check.FaultCounterExceeded, match=r"rank 2 has raised 2 times.*ValueError: boom"):
        count(ill)
    forever = health_check.FaultCounter()
    assert all(forever(ill) is ill for _ in range(100))


def test_a_finalizer_in_a_thread_works_without_cuda_and_has_a_limit():
    """W43: NVRx's wants initialised CUDA."""
    state, done, release = FrozenState(0, 1), [], threading.Event()
    assert finalize.ThreadedFinalize(timedelta(seconds=20), done.append, (1,))(state) is state
    assert (
        finalize.ThreadedFinalize(timedelta(seconds=20), lambda *, a: done.append(a), kwargs={"a": 2})(state) is state
    )
    assert done == [1, 2]
    with pytest.raises(ZeroDivisionError):
        finalize.ThreadedFinalize(timedelta(seconds=20), lambda: 1 / 0)(state)
    with pytest.raises(exception.TimeoutError, match="has not ended within"):
        finalize.ThreadedFinalize(timedelta(seconds=0.01), release.wait)(state)
    release.set()


def test_what_is_bounded_is_waited_for_no_longer():
    """W18: an abort callback that hangs blocks nobody, one that raises is heard."""
    release = threading.Event()
    assert bounded.run("x", release.wait, 0.01).late
    release.set()
    failed = bounded.run("x", lambda: 1 / 0, 20)
    assert isinstance(failed.error, ZeroDivisionError)
    assert bounded.run("x", lambda: None, 20) == bounded.Outcome()


@pytest.mark.parametrize("check", [
    health_check.ChainedGPUHealthCheck, health_check.ChainedNVLHealthCheck, health_check.ChainedNicHealthCheck,
    health_check.CudaHealthCheck,
])  # fmt: skip
def test_what_cannot_be_looked_at_is_no_verdict(check, capfd, monkeypatch, tmp_path):
    """W10: on a machine without NVML NVRx's every restart ends in HealthCheckError."""
    monkeypatch.setattr(devices, "_told", set())
    monkeypatch.setattr(devices, "INFINIBAND", tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    state = FrozenState(0, 1)
    look = check()
    assert look(state) is state
    assert look(state) is state
    told = capfd.readouterr().err
    if check is not health_check.CudaHealthCheck and devices._nvml() is None:
        assert told.count("everstep:") == 1, told
        assert "not checked" in told


class Driver:
    """As much of NVML as is asked."""

    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 274

    def __init__(self, action=0, code=0, down=()):
        self._action, self._code, self._down = action, code, down

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetFieldValues(self, handle, fields):  # noqa: N802
        value = type("Value", (), {"uiVal": self._action})
        return [type("Field", (), {"nvmlReturn": self._code, "value": value})]

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        if link >= 4:
            raise RuntimeError("no such link")
        return int(link not in self._down)


def test_what_the_driver_wants_is_a_verdict(monkeypatch, capfd):
    monkeypatch.setattr(devices, "_told", set())
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Driver(action=2))
    with pytest.raises(exception.HealthCheckError, match=r"rank 3: the driver wants recovery action 2 for GPU 1"):
        health_check.ChainedGPUHealthCheck(1)(FrozenState(3, 4))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Driver(action=2, code=3))
    health_check.ChainedGPUHealthCheck(1)(FrozenState(3, 4))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Driver(down=(1, 2)))
    health_check.ChainedGPUHealthCheck(1)(FrozenState(3, 4))
    health_check.ChainedNVLHealthCheck(1)(FrozenState(3, 4))
    told = capfd.readouterr().err
    assert "570" in told
    assert "NVLinks [1, 2] of GPU 1 are down" in told


class Cuda:
    """As much of torch.cuda as is asked, of a process that uses a GPU."""

    def __init__(self, error=""):
        self.cuda, self._error = self, error

    def is_initialized(self):
        return True

    def current_device(self):
        return 0

    def get_device_properties(self, device):
        return type("Properties", (), {"uuid": "1234"})

    def current_stream(self):
        return self

    def query(self):
        if self._error:
            raise RuntimeError(self._error)
        return False


def test_a_rank_s_own_gpu_is_the_one_that_it_uses_whatever_its_local_rank(monkeypatch):
    """With CUDA_VISIBLE_DEVICES, and where ranks share one, LOCAL_RANK counts something else than NVML does."""
    asked = []
    driver = Driver(action=2)
    driver.nvmlDeviceGetHandleByUUID = asked.append
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver)
    monkeypatch.setitem(__import__("sys").modules, "torch", Cuda())
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert "GPU GPU-1234" in devices.gpu_trouble(None)
    assert asked == ["GPU-1234"]


@pytest.mark.parametrize(
    ("visible", "local_rank", "asked"),
    [(None, "2", 2), ("", "1", 1), ("3,5", "1", 5), ("3", "1", 1), ("GPU-a, GPU-b", "1", "GPU-b")],
)
def test_before_it_uses_one_a_rank_s_gpu_is_what_it_may_see(monkeypatch, visible, local_rank, asked):
    driver, seen = Driver(), []
    driver.nvmlDeviceGetHandleByUUID = driver.nvmlDeviceGetHandleByIndex = seen.append
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpu_trouble(None) == ""
    assert seen == [asked]


def test_a_lost_context_is_told_and_one_that_works_or_is_busy_is_none(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", Cuda())
    assert devices.context_trouble() == ""
    monkeypatch.setitem(__import__("sys").modules, "torch", Cuda("CUDA error: device-side assert triggered\nmore"))
    assert devices.context_trouble() == "the CUDA context is lost: CUDA error: device-side assert triggered"


def test_a_link_that_went_down_is_named(monkeypatch, tmp_path):
    counter = tmp_path / "mlx5_0/ports/1/counters/link_downed"
    counter.parent.mkdir(parents=True)
    counter.write_text("4\n")
    monkeypatch.setattr(devices, "INFINIBAND", tmp_path)
    look, state = health_check.ChainedNicHealthCheck(), FrozenState(0, 1)
    assert look(state) is state
    counter.write_text("5\n")
    with pytest.raises(exception.HealthCheckError, match="mlx5_0/1"):
        look(state)
    assert look(state) is state, "it is told once; the next look counts from here"


def test_an_outer_restarter_is_told_in_its_words(capsys):
    first, spare = FrozenState(0, 2, initial_rank=0), FrozenState(0, 2, initial_rank=0, iteration=3)
    begin = nested_restarter.NestedRestarterHandlingCompleted()
    begin(first)
    begin(dataclasses.replace(first, iteration=1))
    nested_restarter.NestedRestarterHandlingCompleted()(spare)
    nested_restarter.NestedRestarterHandlingStarting()(first)
    nested_restarter.NestedRestarterFinalized()(first)
    nested_restarter.NestedRestarterAborted()(first)
    nested_restarter.NestedRestarterCallback("x", "y")(FrozenState(1, 2, initial_rank=1))
    lines = [line.partition("[NestedRestarter] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "name=[InProcess] state=initialize",
        "name=[InProcess] state=handling stage=completed",
        "name=[InProcess] state=handling stage=completed",
        "name=[InProcess] state=handling stage=starting",
        "name=[InProcess] state=finalized",
        "name=[InProcess] state=aborted",
    ]


def test_records_read_back_and_tell_who():
    record = attribution.InterruptionRecord(3, attribution.Interruption.SOFT_TIMEOUT)
    assert attribution.InterruptionRecord.from_str(str(record)) == record
    for text in ("", "SOFT_TIMEOUT", "SOFT_TIMEOUT:x", "NONE:1"):
        with pytest.raises(ValueError, match="is not an interruption record"):
            attribution.InterruptionRecord.from_str(text)
    both = [record, attribution.InterruptionRecord(1, attribution.Interruption.SOFT_TIMEOUT)]
    assert attribution.format_interruption_records(both) == "SOFT_TIMEOUT on ranks [1, 3]"


def test_the_older_filters_choose_on_a_state_alone():
    with pytest.warns(DeprecationWarning, match="ActiveWorldSizeDivisibleBy"):
        older = rank_filter.WorldSizeDivisibleBy(2)
    chain = Compose(older, rank_filter.MaxActiveWorldSize(5))
    assert isinstance(chain, rank_filter.RankFilter)
    found = [chain(State(r, 7)) for r in range(7)]
    assert [s.active_rank for s in found] == [0, 1, 2, 3, None, None, None]
    assert {s.active_world_size for s in found} == {4}
    assert found[6].mode is Mode.INACTIVE


def test_a_member_of_a_compose_that_returns_nothing_is_told_of():
    chain = Compose(lambda x: [*x, 1], lambda x: None, lambda x: [*x, 3])
    with pytest.warns(UserWarning, match="returned None inside Compose"):
        assert chain([]) == [3, 1], "the last listed runs first, and the state goes on"


def test_waiting_for_an_abort_to_end_burns_no_cpu(monkeypatch):
    """W13: NVRx's `atomic()` spins while an abort holds the lock."""
    import os

    from everstep.clock import SYSTEM
    from everstep.inprocess.iteration import Callbacks, Iterations

    calls = Callbacks(
        initialize=None, abort=None, finalize=None, health_check=None, completion=None, terminate=None,
        rank_assignment=None, rank_filter=None,
    )  # fmt: skip
    ours = Iterations(calls, None, None, SYSTEM)
    held, entered = threading.Event(), threading.Event()

    def hold():
        with ours.atomic_lock:
            held.set()
            entered.wait(1.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    before = os.times()
    with ours.atomic():
        after = os.times()
        entered.set()
    thread.join()
    assert after.elapsed - before.elapsed > 0.5, "it has waited"
    assert after.user + after.system - before.user - before.system < 0.3


def test_an_abort_that_comes_inside_an_atomic_section_is_made_up_for_at_its_end():
    from everstep.clock import SYSTEM
    from everstep.inprocess.iteration import Callbacks, Iterations

    class Told:
        def __init__(self):
            self.aborts = 0

        def __call__(self, state):
            self.aborts += 1
            return state

    told = Told()
    calls = Callbacks(
        initialize=None, abort=told, finalize=None, health_check=None, completion=None, terminate=None,
        rank_assignment=None, rank_filter=None,
    )  # fmt: skip
    ours = Iterations(calls, None, None, SYSTEM)

    def from_outside():
        thread = threading.Thread(target=ours.abort)
        thread.start()
        thread.join()

    with ours.atomic():
        with ours.atomic():
            from_outside()
            assert told.aborts == 0
        assert told.aborts == 0, "only the outermost section ends it"
    assert told.aborts == 1
    from_outside()
    assert told.aborts == 2
