"""NCCL's Flight Recorder: written where it is asked for and recorded, and nowhere else."""

import pickle

import pytest
import torch

from everstep.inprocess import traces


@pytest.mark.parametrize(
    ("environment", "path", "expected"),
    [
        ({}, "/here", None),  # nothing records
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "/here", None),
        ({"TORCH_FR_BUFFER_SIZE": "many"}, "/here", None),
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, None, None),  # nobody asks
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, "/here", "/here"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "NVRX_FR_TRACE_PATH": "/there"}, None, "/there"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "NVRX_FR_TRACE_PATH": "/there"}, "/here", "/here"),
    ],
)
def test_who_asks_for_traces_and_where(monkeypatch, environment, path, expected):
    for name in (*traces.BUFFERS, traces.PATH):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = traces.wanted(path)
    assert (found and str(found)) == expected


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")


def test_a_rank_s_records_are_a_file_of_their_own_in_the_iteration_s_folder(recording, tmp_path):
    file = traces.write(rank=3, iteration=7, path=str(tmp_path))
    assert file == tmp_path / "iter_7" / "nccl_trace_rank_3"
    assert "version" in pickle.loads(file.read_bytes())
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    assert traces.write(rank=3, iteration=7, path=str(tmp_path)) == file, "said twice is written twice"


@pytest.mark.parametrize(("asked", "stacks"), [("", False), ("true", True), ("1", True), ("False", False)])
def test_no_stacks_unless_asked_for(recording, tmp_path, monkeypatch, asked, stacks):
    """Torch takes the interpreter lock for them, and the rank that hangs may hold it."""
    given = []
    monkeypatch.setattr(traces, "_dump", lambda: lambda *arguments: given.append(arguments) or b"records")
    monkeypatch.setenv(traces.STACKS, asked)
    assert traces.write(0, 0, str(tmp_path)).read_bytes() == b"records"
    assert given == [(True, stacks, False)]


def test_a_torch_without_a_recorder_writes_none(recording, tmp_path, monkeypatch):
    for name in traces._DUMPS:
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    assert traces.write(0, 0, str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_an_error_of_the_caller_s(recording, tmp_path):
    (tmp_path / "iter_0").write_text("in the way")
    with pytest.raises(FileExistsError):
        traces.write(0, 0, str(tmp_path))
