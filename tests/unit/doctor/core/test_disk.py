"""What the trial of a checkpoint directory comes to."""

import pytest

from everstep.doctor.core.disk import Disk, elsewhere, judge

GB = 10**9
GOOD = {"tried_in": "/mnt", "free": 1000 * GB, "files": 10**6}
WHAT, SPACE = "checkpoint directory", "space for checkpoints"


def levels(changes, trouble="", state=40 * GB, ranks=8):
    seen = Disk.from_facts("/mnt/ck", GOOD | changes, trouble)
    return [(one.what, one.level.value) for one in judge(seen, state, ranks)]


@pytest.mark.parametrize(
    ("changes", "level"),
    [({}, "ok"), ({"refused": "it cannot be written to"}, "problem"), ({"unlocked": True}, "problem"),
     ({"replaced": True}, "problem")],
)  # fmt: skip
def test_what_does_not_work_is_a_problem(changes, level):
    assert levels(changes) == [(WHAT, level), (SPACE, "ok")]


def test_a_mount_that_does_not_answer_is_a_problem_and_names_where_it_hung():
    (one,) = judge(Disk.from_facts("/mnt/ck", {}, "no answer within 30 s, in: looking at it"), None, 1)
    assert one.level.value == "problem"
    assert one.seen == "/mnt/ck: no answer within 30 s, in: looking at it"


@pytest.mark.parametrize(
    ("free", "level"), [(14 * GB, "problem"), (15 * GB, "warning"), (119 * GB, "warning"), (120 * GB, "ok")]
)
def test_space_is_for_what_is_kept_and_one_more(free, level):
    """Three times 40 GB where eight ranks share the state, three times 5 GB where each has a copy."""
    assert levels({"free": free})[1:] == [(SPACE, level)]


def test_inodes_and_what_was_not_said():
    assert levels({"files": 5})[1:] == [(SPACE, "ok"), (SPACE, "warning")]
    assert levels({"files": None}, state=None)[1:] == [(SPACE, "ok")]
    assert elsewhere("s3://bucket/run").level.value == "warning"
