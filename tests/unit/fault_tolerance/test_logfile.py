"""The launcher's own log under NVRx's flag."""

import pytest

from everstep.events import Notice, RunEnded
from everstep.fault_tolerance.logfile import LogFile
from everstep.telemetry import Telemetry


def test_each_event_is_a_line_and_a_moved_file_is_made_anew(tmp_path):
    telemetry = Telemetry("agent", sinks=[LogFile(str(tmp_path / "logs/launcher.log"))])
    telemetry.emit(Notice(text="rank 1 is gone\nits stack", level="warning"))
    telemetry.emit(RunEnded(code=1, reason="over"))
    lines = (tmp_path / "logs/launcher.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines[:1]] == ["WARNING rank 1 is gone"]
    assert lines[1] == "    its stack"
    assert lines[2].endswith("+00:00 RunEnded code=1 reason='over'")
    (tmp_path / "logs/launcher.log").rename(tmp_path / "old.log")
    telemetry.emit(Notice(text="again"))
    assert (tmp_path / "logs/launcher.log").read_text().endswith("INFO again\n")


def test_a_place_that_takes_nothing_is_told_once_and_ends_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    telemetry = Telemetry("agent", sinks=[LogFile(str(tmp_path / "file/launcher.log"))])
    for _ in range(2):
        telemetry.emit(Notice(text="x"))
    assert capsys.readouterr().err.count("LogFile cannot be written") == 1


@pytest.mark.parametrize("text", ["ä\u2028", "\udcff"])
def test_any_text_is_written_or_told(tmp_path, text):
    Telemetry("agent", sinks=[LogFile(str(tmp_path / "log"))]).emit(Notice(text=text))
