"""Callbacks of the abort: what each ends, and what it does where there is nothing to end."""

import importlib
import sys
import types

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")

from everstep import resources
from everstep.inprocess import abort, nccl
from everstep.inprocess.state import FrozenState

STATE = FrozenState(3, 4, iteration=7)


@pytest.fixture
def grouped(monkeypatch):
    """A process that has groups."""
    monkeypatch.setattr(abort.dist, "is_initialized", lambda: True)


@pytest.fixture
def recorder(monkeypatch):
    """A Flight Recorder that has something to tell."""
    asked = []
    c10d = importlib.import_module("torch._C._distributed_c10d")

    def dump(**options):
        asked.append(options)
        return b"what every rank did"

    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    return asked


def test_nothing_to_end_is_no_error():
    assert abort.AbortTorchDistributed()(STATE) is STATE
    assert abort.AbortTransformerEngine()(STATE) is STATE
    assert abort.AbortPersistentCheckpointProcesses()(STATE) is STATE


def test_all_groups_are_aborted_at_the_same_time_and_failures_are_told(monkeypatch, capfd):
    """W18: NVRx reads no exception of the threads that abort."""
    import threading

    both = threading.Barrier(2, timeout=20)

    def fails():
        both.wait()
        raise RuntimeError("it does not end")

    monkeypatch.setattr(nccl, "aborts", lambda: {"nccl group a": both.wait, "nccl group b": fails})
    abort.AbortTorchDistributed()(STATE)
    assert "abort: nccl group b: RuntimeError: it does not end" in capfd.readouterr().err


def test_under_the_wrapper_its_engine_ends_the_communication(monkeypatch):
    monkeypatch.setattr(nccl, "aborts", lambda: pytest.fail("the engine does it"))
    severed = []
    with abort.severing(lambda: severed.append(1)):
        abort.AbortTorchDistributed()(STATE)
    assert severed == [1]


def test_a_trace_is_written_before_anything_is_aborted(grouped, recorder, tmp_path, monkeypatch):
    order = []
    with abort.severing(lambda: order.append((tmp_path / "iter_7/rank_3").exists())):
        abort.AbortTorchDistributed(str(tmp_path))(STATE)
        assert (tmp_path / "iter_7/rank_3").read_bytes() == b"what every rank did"
        assert order == [True]
        assert recorder == [{"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}]
        monkeypatch.setenv("NVRX_FR_TRACE_PATH", str(tmp_path / "other"))
        abort.AbortTorchDistributed()(STATE)
        assert (tmp_path / "other/iter_7/rank_3").exists()


def test_a_trace_that_cannot_be_written_keeps_nothing_from_being_aborted(grouped, recorder, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    severed = []
    with abort.severing(lambda: severed.append(1)):
        abort.AbortTorchDistributed(str(tmp_path / "file/folder"))(STATE)
    assert severed == [1]
    assert "Flight Recorder was not written" in capfd.readouterr().err


def test_nothing_is_recorded_where_torch_records_nothing(grouped, recorder, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    with abort.severing(lambda: None):
        abort.AbortTorchDistributed(str(tmp_path))(STATE)
    assert recorder == []
    assert list(tmp_path.iterdir()) == []


def test_transformer_engine_lets_go_where_it_is_in_use(monkeypatch):
    done = []
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module",
             "transformer_engine.pytorch.module.base", "transformer_engine.pytorch.fp8")  # fmt: skip
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[3]].destroy_ub = lambda: done.append("buffers")
    abort.AbortTransformerEngine()(STATE)
    assert done == ["buffers"], "an older one has no FP8 state to reset"
    manager = types.SimpleNamespace(reset=lambda: done.append("fp8"))
    sys.modules[names[4]].FP8GlobalStateManager = manager
    abort.AbortTransformerEngine()(STATE)
    assert done == ["buffers", "buffers", "fp8"]


def test_what_writes_checkpoints_is_ended_and_nothing_else():
    ended = []
    held = [
        resources.REGISTRY.register("checkpoint", "writer", lambda deadline_s: ended.append("writer")),
        resources.REGISTRY.register("other", "thing", lambda deadline_s: ended.append("thing")),
    ]
    abort.AbortPersistentCheckpointProcesses()(STATE)
    for one in held:
        one.release()
    assert ended == ["writer"]
