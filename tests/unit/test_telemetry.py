"""A ledger line holds every field of every event, is whole or spoils itself alone, and costs a training step little."""

import dataclasses
import fcntl
import io
import json
import os
import sys
import typing

import pytest

from everstep import events
from everstep.errors import LedgerError
from everstep.events import Event, Record, Stamp, StepDone
from everstep.telemetry import JsonLines, Telemetry, read_lines, show

STAMP = Stamp(mono_s=1.5, wall_s=2e9, boot_id="ab", pid=7, role="worker", slot=1, rank=0, generation=2)
SAMPLES = {str: 'é\n"', int: 3, float: 0.1, bool: True, tuple: ((0, 1, 2, "kept"),)}


class StoppedClock:
    def now(self):
        return 100.0

    def wall(self):
        return 2e9


def sample(kind: type[Event]) -> Event:
    """One with every field set."""
    hints = typing.get_type_hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        plain = [t for t in (typing.get_args(hints[field.name]) or [hints[field.name]]) if t in SAMPLES]
        given[field.name] = SAMPLES[plain[0]] if plain else ()
        if field.name == "values":
            given[field.name] = {"loss": 0.1, "NaN": float("inf")}
        elif field.name == "members":
            given[field.name] = ((0, 1, 2, "kept"),)
        elif field.name == "argv":
            given[field.name] = ("a", "b")
    return kind(**given)


@pytest.mark.parametrize("kind", Event.known.values(), ids=lambda kind: kind.__name__)
def test_every_field_of_every_event_is_written_and_read(kind):
    record = Record(STAMP, sample(kind))
    body = json.loads(record.to_json())
    assert body["v"] == events.VERSION
    assert body["event"] == kind.__name__
    assert list(body["at"]) == [f.name for f in dataclasses.fields(Stamp)]
    assert list(body["is"]) == [f.name for f in dataclasses.fields(kind)]
    assert json.dumps(body["is"]) == json.dumps(dataclasses.asdict(record.event))
    assert Record.from_json(record.to_json()) == record


def test_the_time_of_an_event_can_be_earlier_than_its_line():
    telemetry = Telemetry("worker", clock=StoppedClock(), rank=3)
    now, then = telemetry.emit(StepDone(step=1, seconds=0.5)), telemetry.emit(StepDone(step=1, seconds=0.5), at_s=98.0)
    assert (now.stamp.mono_s, now.stamp.wall_s) == (100.0, 2e9)
    assert (then.stamp.mono_s, then.stamp.wall_s) == (98.0, 2e9 - 2)
    assert (now.stamp.rank, now.stamp.pid) == (3, os.getpid())


def test_a_torn_line_spoils_itself_alone(tmp_path):
    """I6: the newline comes first, so the line after a torn one begins anew."""
    sink = JsonLines(tmp_path / "events.jsonl")
    first, last = Record(STAMP, StepDone(step=1, seconds=0.5)), Record(STAMP, StepDone(step=3, seconds=0.5))
    sink.write(first)
    os.write(sink._fd, ("\n" + Record(STAMP, StepDone(step=2, seconds=0.5)).to_json()).encode()[:50])
    sink.write(last)
    sink.close()
    records, unread = read_lines([sink.path])
    assert records == [first, last]
    assert len(unread) == 1


def test_a_sink_that_fails_is_told_of_once_and_the_others_hear_on(tmp_path, capfd):
    """A full disk may be emptied: the sink is tried again with every event."""
    (tmp_path / "no folder").write_text("")
    broken, whole = JsonLines(tmp_path / "no folder" / "a"), JsonLines(tmp_path / "b")
    telemetry = Telemetry("worker", [broken, whole])
    for n in (1, 2):
        telemetry.emit_all([(StepDone(step=n, seconds=0.5), None), (StepDone(step=n, seconds=0.5), 1.0)])
    (tmp_path / "no folder").unlink()
    telemetry.emit(StepDone(step=3, seconds=0.5))
    told = capfd.readouterr().err
    assert told.count("cannot be written") == 1
    assert "4 events were lost" in told
    assert [len(read_lines([sink.path])[0]) for sink in (broken, whole)] == [1, 5]
    broken.close()
    whole.close()


def test_events_told_together_are_one_write_of_whole_lines(tmp_path):
    sink = JsonLines(tmp_path / "a")
    telemetry = Telemetry("worker", [sink], clock=StoppedClock())
    together = [(StepDone(step=n, seconds=0.5), float(n)) for n in range(3)]
    records = telemetry.emit_all(together)
    assert [r.stamp.mono_s for r in records] == [0.0, 1.0, 2.0]
    assert sink.path.read_text() == "".join("\n" + r.to_json() for r in records)
    assert read_lines([sink.path]) == (records, [])
    sink.close()


def test_what_is_no_event_is_refused():
    for line in ("", "[]", "{}", '{"event":"StepDone","at":{},"is":{}}', '{"event":"Nothing","at":{},"is":{}}'):
        with pytest.raises(LedgerError, match="not an event"):
            Record.from_json(line)


def test_what_nobody_reads_costs_a_moment_and_not_the_caller(monkeypatch):
    """A pipe that is full: a rank stood there with its traceback, and its agent knew of no fault."""
    reader, writer = os.pipe()
    filled = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        show("y" * 2 * filled, limit_s=0.05)
        assert 0 < len(os.read(reader, 2 * filled)) <= filled
        show("z" * 100, limit_s=0.05)
        assert os.read(reader, 2 * filled).endswith(b"z" * 100)
    os.close(reader)


def test_a_stream_of_the_script_s_own_is_written_to_as_it_is(monkeypatch):
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stderr", kept)
    show("a line\n" * 1000)
    assert kept.getvalue() == "a line\n" * 1000
    monkeypatch.setattr(sys, "stderr", object())
    show("nobody takes it")
    monkeypatch.setattr(sys, "stderr", None)
    show("nobody is there")
