"""A restore under `run.steps` from a directory: damage is said, what cannot be read ends it, nothing begins anew."""

import errno
import os

import pytest

from everstep.clock import SystemClock
from everstep.errors import ConfigurationError, DamagedCheckpoint, ExitCode, UnreachableStorage
from everstep.inprocess.assignment import Assignment
from everstep.training.keeper import Keeper


class Passing(SystemClock):
    def __init__(self):
        self.passed = 0.0

    def now(self):
        return self.passed

    def sleep(self, seconds):
        self.passed += seconds


class Snapshots:
    """Memory holds nothing."""

    bound = None

    def __init__(self, restore):
        self.instructions = {"restore": restore}
        self.taken = []

    def restore(self):
        return None

    def take(self, step):
        self.taken.append(step)


class Readers:
    """Each gives what `answer` does, or raises it."""

    def __init__(self, answer):
        self.answer, self.asked, self.closed, self.reads = answer, [], 0, 0

    def ask(self, tier):
        self.asked.append(tier)
        return self

    def __call__(self, path):
        return self

    def manifest(self):
        self.reads += 1
        return self.answer()

    def close(self):
        self.closed += 1


class Told:
    def __init__(self):
        self.damage = []

    def damaged(self, tier, step, text):
        self.damage.append((tier, step, text))

    def emit(self, event, **more):
        return


FROM_DISK = {"tier": "disk", "step": 40, "path": "/ckpt/step-40", "saved_by": 1}


def keeper(restore, answer=None, lost=""):
    told, snapshots, readers = Told(), Snapshots(restore), Readers(answer)
    assignment = Assignment(1, 0, 0, 1, ("", 0), {"disk": {"directory": "/ckpt", "lost": lost}})
    made = Keeper(assignment, snapshots, told, told, Passing(), readers=readers)
    return made, told, snapshots, readers


def failing(code):
    def answer():
        raise OSError(code, os.strerror(code), "/ckpt/step-40/manifest.json")

    return answer


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
def test_what_cannot_be_read_is_tried_again_and_then_ends_the_job_for_a_scheduler_to_try(code):
    made, told, _, readers = keeper(FROM_DISK, failing(code))
    with pytest.raises(UnreachableStorage, match=r"step-40/manifest\.json cannot be read now") as caught:
        made.restore(100)
    assert caught.value.exit_code == ExitCode.BAD_NODE
    assert told.damage == [], "nothing is struck out for it"
    assert (readers.asked, readers.closed > 0, readers.reads > 10) == (["disk"], True, True)


@pytest.mark.parametrize("answer", [failing(errno.ENOENT), lambda: b"no manifest"])
def test_what_is_damaged_is_said_and_struck_out(answer):
    made, told, _, readers = keeper(FROM_DISK, answer)
    with pytest.raises(DamagedCheckpoint):
        made.restore(100)
    ((tier, step, text),) = told.damage
    assert (tier, step) == ("disk", 40)
    assert "manifest.json" in text
    assert readers.closed


def test_where_all_that_was_saved_is_damaged_nothing_begins_at_step_1():
    made, _, snapshots, _ = keeper(None, lost="no checkpoint in /ckpt is whole any more")
    with pytest.raises(ConfigurationError, match="is whole any more"):
        made.restore(100)
    assert snapshots.taken == []
    made, _, snapshots, _ = keeper(None)
    assert made.restore(100) == 0
    assert snapshots.taken == [0]
