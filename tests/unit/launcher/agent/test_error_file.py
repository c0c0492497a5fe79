"""Why a job failed, in the file that whoever started it has named."""

import json

import pytest

from everstep.launcher.agent import error_file
from everstep.recovery.core.words import Fault, Incarnation

WHO = [Incarnation("boot", pid, 1) for pid in (7, 8)]


def cause(number):
    return Fault(generation=number, kind="death", noticed_by="agent", incarnation=WHO[number])


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "why.json"))
    return tmp_path / "why.json"


def recorded(tmp_path, number, text):
    path = tmp_path / f"error-{number}.json"
    path.write_text(text)
    return {WHO[number]: str(path)}


def test_what_the_last_rank_to_fail_has_recorded_is_handed_on_with_the_code(tmp_path, target, capsys):
    files = recorded(tmp_path, 0, '{"message": {"message": "first"}}')
    files |= recorded(tmp_path, 1, '{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "here"}}}')
    error_file.hand_on(files, [cause(0), cause(1)], 1, "our words")
    told = json.loads(target.read_text())["message"]
    assert (told["message"], told["errorCode"], told["extraInfo"]) == ("ValueError: x", 1, {"py_callstack": "here"})
    assert f"what the rank has recorded: {files[WHO[1]]}" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "[1]", "{torn"])
def test_where_the_rank_has_recorded_nothing_our_words_stand_there(tmp_path, target, text):
    files = {} if text is None else recorded(tmp_path, 1, text)
    error_file.hand_on(files, [cause(1)], 75, "a node is lost")
    told = json.loads(target.read_text())["message"]
    assert (told["message"], told["errorCode"]) == ("a node is lost", 75)
    assert int(told["extraInfo"]["timestamp"]) > 0


def test_a_recorder_s_own_form_is_handed_on_as_it_is(tmp_path, target):
    error_file.hand_on(recorded(tmp_path, 1, '{"message": "text"}'), [cause(1)], 1, "")
    assert json.loads(target.read_text()) == {"message": "text"}


def test_a_job_that_has_not_failed_writes_nothing(tmp_path, target):
    error_file.hand_on(recorded(tmp_path, 1, "{}"), [cause(1)], 0, "")
    assert not target.exists()


def test_without_a_name_nothing_is_written_and_a_place_that_takes_nothing_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    error_file.hand_on({}, [], 1, "x")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "why.json"))
    error_file.hand_on({}, [], 1, "x")
    assert "why.json cannot be written: No such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
