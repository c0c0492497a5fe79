"""A run folder holds one job: who may use it again, and who is refused."""

import pytest

from everstep.errors import UsageError
from everstep.events import Record, RunStarted, Stamp
from everstep.launcher.again import Job, last_started


@pytest.fixture
def folder(tmp_path):
    """A run folder of train.py with two ranks, begun twice; the newest line counts."""
    (tmp_path / "run" / "events").mkdir(parents=True)
    script = tmp_path / "train.py"
    script.write_text("1\n")
    for number, arguments in enumerate((("5",), ("10",))):
        event = RunStarted(
            job="j", argv=(), world_size=2, spares=1, script=str(script), arguments=arguments
        )  # fmt: skip
        stamp = Stamp(mono_s=1.0, wall_s=10.0 + number, boot_id="b", pid=9 - number, role="agent")
        line = Record(stamp=stamp, event=event).to_json()
        (tmp_path / "run" / "events" / f"agent-{9 - number}.jsonl").write_text(line + "\n" + line[:40])
    return tmp_path


def job(folder, name="train.py", arguments=("10",), world_size=2):
    return Job(str(folder / name), arguments, world_size)


def test_the_same_job_goes_on(folder):
    assert last_started(folder / "run").arguments == ("10",)
    assert job(folder).check(folder / "run") == []
    (folder / "train.py").write_text("edited\n")
    assert job(folder).check(folder / "run") == []


def test_other_arguments_are_told_and_no_more(folder):
    (told,) = job(folder, arguments=("20",)).check(folder / "run")
    assert told == "the run folder's job goes on with other arguments: 20 (before: 10)"


def test_a_moved_copy_goes_on_and_another_script_of_that_name_does_not(folder):
    (folder / "copy").mkdir()
    copy = folder / "copy" / "train.py"
    copy.write_text("1\n")
    assert job(folder, "copy/train.py").check(folder / "run") == []
    copy.write_text("2\n")
    with pytest.raises(UsageError, match="Name another with --run-dir"):
        job(folder, "copy/train.py").check(folder / "run")
    (folder / "train.py").unlink()
    assert job(folder, "copy/train.py").check(folder / "run") == []


@pytest.mark.parametrize(
    ("change", "told"), [({"name": "other.py"}, "other.py"), ({"world_size": 3}, "a job of 2 ranks, this one is of 3")]
)
def test_another_job_is_refused_with_the_mend(folder, change, told):
    with pytest.raises(UsageError, match="Name another with --run-dir") as refusal:
        job(folder, **change).check(folder / "run")
    assert told in str(refusal.value)


def test_a_new_folder_and_a_ledger_of_before_refuse_nobody(folder, tmp_path):
    assert job(folder).check(tmp_path / "new") == []
    for path in (folder / "run" / "events").iterdir():
        path.write_text(path.read_text().replace('"script":', '"no":'))
    assert job(folder, "other.py").check(folder / "run") == []


@pytest.mark.parametrize(
    ("begun", "newest"),
    [
        ([("b", 1.0, 7200.0), ("b", 2.0, 10.0)], 1),  # begun again when the time of day had been set back
        ([("b", 2.0, 10.0), ("b", 1.0, 7200.0)], 0),
        ([("b", 900.0, 50.0), ("c", 1.0, 60.0)], 1),  # after the machine was started anew
        ([("b", 1.0, 7200.0), ("b", 2.0, 10.0), ("c", 1.0, 60.0)], 2),  # both
    ],
)
def test_the_newest_is_found_though_the_time_of_day_has_jumped(tmp_path, begun, newest):
    (tmp_path / "events").mkdir()
    for number, (boot, mono, wall) in enumerate(begun):
        event = RunStarted(job="j", argv=(), world_size=2, spares=1, script="s", arguments=(str(number),))
        stamp = Stamp(mono_s=mono, wall_s=wall, boot_id=boot, pid=number, role="agent")
        (tmp_path / "events" / f"agent-{number}.jsonl").write_text(Record(stamp=stamp, event=event).to_json())
    assert last_started(tmp_path).arguments == (str(newest),)
