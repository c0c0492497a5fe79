"""Sinks that fail lose events and say so; they end nothing, and are tried again."""

import io
import sys

import pytest

from everstep import telemetry
from everstep.events import Notice
from everstep.telemetry import JsonLines, Telemetry, leave_streams, read_lines, say


class Flaky:
    def __init__(self):
        self.full, self.taken = False, []

    def write(self, record):
        if self.full:
            raise OSError(28, "No space left on device")
        self.taken.append(record.event.text)


def emit(where: Telemetry, *texts: str) -> None:
    for text in texts:
        where.emit(Notice(text=text, level="info"))


def test_a_sink_that_fails_is_tried_again_and_what_was_lost_is_told_once(capsys):
    sink, other = Flaky(), Flaky()
    where = Telemetry("agent", sinks=[sink, other])
    emit(where, "a")
    sink.full = True
    emit(where, "b", "c", "d")
    sink.full = False
    emit(where, "e")
    assert (sink.taken, other.taken) == (["a", "e"], ["a", "b", "c", "d", "e"])
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "everstep: Flaky cannot be written, events of this run are lost: [Errno 28] No space left on device. "
        "Free some space there",
        "everstep: Flaky can be written again; 3 events were lost",
    ]


def test_a_ledger_file_is_made_when_it_can_be_and_again_when_it_was_removed(tmp_path, capsys):
    path = tmp_path / "events" / "agent.jsonl"
    (tmp_path / "events").touch()  # in the way
    where = Telemetry("agent", sinks=[JsonLines(path)])
    emit(where, "lost")
    (tmp_path / "events").unlink()
    emit(where, "first")
    path.unlink()
    path.parent.rmdir()
    emit(where, "second")
    records, unread = read_lines([path])
    assert [r.event.text for r in records] == ["second"]
    assert unread == []
    assert "1 events were lost" in capsys.readouterr().err


def test_a_closed_ledger_is_not_opened_again(tmp_path, capsys):
    sink = JsonLines(tmp_path / "agent.jsonl")
    where = Telemetry("agent", sinks=[sink])
    sink.close()
    emit(where, "late")
    assert not (tmp_path / "agent.jsonl").exists()
    assert "is closed" in capsys.readouterr().err


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


@pytest.mark.parametrize("stream", [None, Broken()])
def test_a_console_that_is_gone_is_no_reason_to_fail(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    say("hello")


def test_leaving_flushes_and_ends_well_without_streams(monkeypatch):
    taken = io.StringIO()
    monkeypatch.setattr(telemetry, "sys", type("sys", (), {"stdout": taken, "stderr": taken}))
    leave_streams()
    assert not taken.closed
