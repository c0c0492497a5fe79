import json

import pytest

from everstep.errors import UsageError
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, PlannedFault, Spec, plan, plan_of


@pytest.mark.parametrize("seed", range(50))
def test_what_is_written_is_read(seed):
    made = plan(seed, 5, ("exception", "gil"), (0.3, 0.7), 3, 100)
    fired = {0: 1.5, 3: 2.25}
    assert codec.loads(codec.dumps(made, fired), "x") == (made, fired)
    assert codec.from_rows(json.loads(json.dumps(codec.rows(made.faults)))) == made.faults


def test_a_plan_written_by_hand_needs_little():
    first = {"step": 9, "rank": 1, "type": "hang"}
    second = {"step": 4, "rank": 0, "type": "exit", "position": "forward"}
    text = json.dumps({"faults": [first, second]})
    read, fired = codec.loads(text, "mine.json")
    assert read == Plan((PlannedFault(1, 4, 0, "exit", "forward"), PlannedFault(0, 9, 1, "hang", "boundary")))
    assert fired == {}


def one(**change):
    return json.dumps({"faults": [{"step": 9, "rank": 1, "type": "hang", **change}]})


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "'faults' is missing"),
        ('{"faults": [3]}', "cannot be read"),
        ('{"faults": [{"step": 9, "type": "hang"}]}', "'rank' is missing"),
        ('{"version": 2, "faults": []}', "version 2 is not known"),
        (one(type="meteor"), "'meteor' is not known; choose from"),
        (one(position="lunch"), "choose from forward, backward"),
        (one(step=0), "steps count from 1"),
        (one(rank=-1), "ranks from 0"),
        (one(step="soon"), "cannot be read"),
        (json.dumps({"faults": [{"index": 1, "step": s, "rank": 0, "type": "hang"} for s in (4, 8)]}), "same index"),
        (json.dumps({"faults": [{"step": s, "rank": 0, "type": "hang"} for s in range(1, 1002)]}), "at most 1000"),
    ],
)
def test_a_damaged_file_is_named_with_its_wound(text, mend):
    with pytest.raises(UsageError, match=f"fault plan mine.json.*{mend}"):
        codec.loads(text, "mine.json")


def test_ranks_must_exist():
    made = plan(1, 5, ("hang",), (), 4, 100)
    codec.check_world(made, 4)
    with pytest.raises(UsageError, match="rank 3, but ranks run from 0 to 2"):
        codec.check_world(made, 3)


def test_table():
    made = plan_of(Spec(2, 42, ("exception", "hang"), steps=50), 2, 50)
    assert codec.table(made, {1}).splitlines() == TABLE
    assert codec.table(Plan(())) == "fault plan: 0 faults"


TABLE = [
    "fault plan: 2 faults, seed 42, 50 steps, 2 ranks",
    "   #     step   rank  type       position",
    "   0       16      1  hang       backward",
    "   1       42      0  exception  forward    fired",
]


def test_the_largest_plan_fits_into_one_message():
    rows = codec.rows(plan(1, 1000, ("exception",), (), 4096, 10**7).faults)
    assert len(json.dumps(rows)) < 128 * 1024
