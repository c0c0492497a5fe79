"""What is tried of names and directories, on this machine."""

import os
import socket

import pytest

from everstep.doctor import child
from everstep.doctor.trial import heard


@pytest.fixture
def facts(capsys):
    def tried(trial, **asked):
        trial(asked)
        return heard(capsys.readouterr().out.splitlines())[0]

    return tried


def test_a_directory_that_serves_is_left_as_it_was(facts, tmp_path):
    told = facts(child.try_disk, directory=str(tmp_path / "not" / "yet"))
    assert told["tried_in"] == str(tmp_path)
    assert (told["unlocked"], "refused" in told, "replaced" in told) == (False, False, False)
    assert told["free"] > 0
    assert os.listdir(tmp_path) == []


def test_what_is_no_directory_is_refused_by_the_system_s_word(facts, tmp_path):
    (tmp_path / "file").write_text("")
    told = facts(child.try_disk, directory=str(tmp_path / "file"))
    assert told["refused"] == f"nothing can be made in {tmp_path / 'file'}: Not a directory"


def test_locks_that_do_not_hold_are_seen(facts, tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.checkpoint.directory.fcntl.flock", lambda fd, how: None)
    assert facts(child.try_disk, directory=str(tmp_path))["unlocked"] is True
    assert os.listdir(tmp_path) == []


def test_a_lock_that_is_refused_is_told_as_a_job_would_tell_it(facts, tmp_path, monkeypatch):
    def no_locks(fd, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("everstep.checkpoint.directory.fcntl.flock", no_locks)
    assert "No locks available" in facts(child.try_disk, directory=str(tmp_path))["refused"]


def test_a_rename_that_swallows_a_directory_is_seen(facts, tmp_path, monkeypatch):
    rename = os.rename

    def swallowing(old, new):
        if os.path.isdir(new):
            rename(new, new + ".gone")
        rename(old, new)

    monkeypatch.setattr(child.os, "rename", swallowing)
    assert facts(child.try_disk, directory=str(tmp_path))["replaced"] is True


def test_a_port_of_ours_is_free_or_somebody_s(facts):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        told = facts(child.try_names, host="127.0.0.1", port=port)
    assert (told["addresses"], told["ours"], told["port"]) == (["127.0.0.1"], True, "Address already in use")
    told = facts(child.try_names, host="127.0.0.1", port=port)
    assert (told["port"], told["name"]) == ("free", socket.gethostname())


def test_a_port_that_is_another_s_is_reached_or_refused(facts, monkeypatch):
    monkeypatch.setattr(child, "_is_ours", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert facts(child.try_names, host="127.0.0.1", port=port)["port"] == "open"
    assert facts(child.try_names, host="127.0.0.1", port=port)["port"] == "refused"


def test_a_name_that_does_not_resolve(facts):
    told = facts(child.try_names, host="no-such-host.invalid", port=1)
    assert told["unresolved"].startswith("does not resolve (")
    assert "port" not in told
