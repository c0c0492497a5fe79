"""The file that leads operators to an agent: for its owner's eyes, whole or not there."""

import os
import stat

import pytest

from everstep.recovery import control_file
from everstep.recovery.control_file import NAME, ControlFile

ONE = ControlFile("127.0.0.1", 4000, "secret", "host-a", "node-0", 7, "job")


def test_it_comes_back_as_it_was_written_and_only_its_owner_reads_it(tmp_path):
    before = os.umask(0)  # the most open there is
    try:
        ONE.write(tmp_path)
    finally:
        os.umask(before)
    assert ControlFile.read(tmp_path / NAME) == ONE
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [NAME]


def test_it_replaces_an_older_one_of_any_mode_and_a_part_that_a_killed_agent_left(tmp_path):
    (tmp_path / NAME).write_text("{}")
    (tmp_path / NAME).chmod(0o666)
    (tmp_path / f".{NAME}.7").symlink_to(tmp_path / "elsewhere")
    ONE.write(tmp_path)
    assert ControlFile.read(tmp_path / NAME) == ONE
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"address": "a", "port": "x"}'])
def test_what_is_none_is_a_value_error(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ValueError):
        ControlFile.read(tmp_path / NAME)


def test_to_remove_what_is_not_there_is_nothing(tmp_path):
    ONE.write(tmp_path)
    for _ in range(2):
        control_file.remove(tmp_path)
    assert os.listdir(tmp_path) == []
