"""What a node must reach before it joins."""

import os

import pytest

from everstep.errors import ExitCode, UsageError
from everstep.fault_tolerance import storage


def test_what_can_be_read_is_fit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10000)
    storage.require([str(tmp_path), str(tmp_path / "file"), "/dev/null"], distributed=False)
    storage.require([], distributed=False)


def test_all_that_is_not_fit_is_named_and_the_node_is_to_be_replaced(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(storage.UnfitNode) as unfit:
        storage.require([str(tmp_path / "gone"), str(tmp_path), str(tmp_path / "link")], distributed=False)
    assert unfit.value.exit_code == ExitCode.BAD_NODE
    for name in ("gone", "link"):
        assert f"{tmp_path / name}: No such file or directory" in str(unfit.value)


def test_storage_that_does_not_answer_is_given_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert storage.look(str(tmp_path / "pipe")) == ""  # looked at, not read
    with pytest.raises(storage.UnfitNode, match="no answer within"):
        storage.require([str(tmp_path)], distributed=False, limit_s=0.0)  # no interpreter starts in no time


def test_mounts_of_distributed_file_systems_are_found(tmp_path):
    (tmp_path / "mounts").write_text(
        "/dev/sda1 / ext4 rw 0 0\nserver:/x /mnt/a\\040b nfs4 rw 0 0\n10.0.0.1@o2ib:/l /lustre lustre rw 0 0\nproc\n"
    )
    assert storage.mounts(str(tmp_path / "mounts")) == ["/mnt/a b", "/lustre"]
    storage.require([], distributed=True)  # of this machine


@pytest.mark.parametrize(("text", "fit"), [("healthy\n", True), ("NOT HEALTHY\n", False)])
def test_lustre_s_own_word_counts(tmp_path, monkeypatch, text, fit):
    (tmp_path / "health_check").write_text(text)
    monkeypatch.setattr(storage, "LUSTRE", str(tmp_path / "health_check"))
    assert (storage.look(storage.LUSTRE) == "") is fit


@pytest.mark.parametrize(("text", "paths"), [(None, []), ("", []), ("/a, /b,", ["/a", "/b"])])
def test_paths_are_listed_with_commas(text, paths):
    assert storage.paths_of(text) == paths


def test_a_path_that_is_not_absolute_is_refused():
    with pytest.raises(UsageError, match="here: give absolute paths"):
        storage.paths_of("/a,here")
