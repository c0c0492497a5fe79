"""Who stands where, and who comes first."""

import pytest

from everstep.operator.core.groups import groups, lines, title

REDUCE = [["t.py", 3, "train"], ["dist.py", 9, "all_reduce"]]
SLEEP = [["t.py", 2, "train"]]
BLOCKS = "rank {}: does not wait; others wait for it"


def rank(number, frames=REDUCE, *, waiting=True, step=4, why="", node="node-0", phase="step", age=1.0):
    threads = [{"name": "other", "first": False, "frames": []}, {"name": "MainThread", "first": True, "frames": frames}]
    return {
        "rank": number, "node": node, "step": step, "mark_age_s": age, "phase": phase, "waiting": waiting, "why": why,
        "threads": threads if frames is not None else [],
    }  # fmt: skip


def told(*ranks):
    found = groups(ranks)
    return [title(group, found) for group in found]


@pytest.mark.parametrize(
    ("ranks", "titles"),
    [
        (
            [rank(0), rank(1), rank(2, SLEEP, waiting=False), rank(3)],
            ["rank 2: does not wait; others wait for it", "ranks 0-1,3: wait for others"],
        ),
        (
            [rank(0), rank(1, SLEEP, waiting=False), rank(2, None, waiting=None, why="does not answer (state T)")],
            ["rank 2: does not answer (state T)", BLOCKS.format(1), "rank 0: waits for others"],
        ),
        (
            [rank(0, SLEEP, waiting=False, step=7), rank(1, REDUCE, waiting=False, step=5), rank(2)],
            [BLOCKS.format(1), BLOCKS.format(0), "rank 2: waits for others"],
        ),
        ([rank(0), rank(1)], ["ranks 0-1: wait for others"]),
        ([rank(0, SLEEP, waiting=False), rank(1, SLEEP, waiting=False)], ["ranks 0-1: run"]),
        ([rank(0, SLEEP, waiting=False, phase="done"), rank(1, SLEEP, waiting=False)],
         ["rank 1: does not wait; others wait for it", "rank 0: waits for others"]),
        ([rank(0, SLEEP, waiting=None, step=None, why="")], ["rank 0: runs"]),
        ([], []),
    ],
)  # fmt: skip
def test_the_culprit_comes_first_and_nothing_is_said_that_was_not_seen(ranks, titles):
    assert told(*ranks) == titles


def test_ranks_that_do_not_answer_are_one_group_wherever_in_the_kernel_they_wait():
    ranks = [rank(n, None, waiting=None, why=f"does not answer (state {s})") for n, s in enumerate("TTD")]
    assert told(*ranks) == ["ranks 0-2: does not answer (state D); does not answer (state T)"]


def test_nodes_are_named_where_there_are_several():
    assert told(rank(0, node="node-0"), rank(1, SLEEP, waiting=False, node="node-3")) == [
        "rank 1 (node-3): does not wait; others wait for it",
        "rank 0 (node-0): waits for others",
    ]


def test_the_stack_the_step_and_the_last_sign_of_the_group_are_shown():
    found = groups([rank(0, age=2.0), rank(1, step=5, age=0.5), rank(2, None, step=None, age=None, waiting=None)])
    by_ranks = {group.ranks: lines(group, found) for group in found}
    assert by_ranks[(0, 1)][1:] == [
        "  step 4 done, last mark 0.5 s ago",
        "    t.py:3 in train",
        "    dist.py:9 in all_reduce",
    ]
    assert by_ranks[(2,)][1:] == ["    its stack is not known"]


def test_a_name_in_a_stack_does_not_act_on_the_terminal():
    found = groups([rank(0, [["\x1b[2Jt.py", 1, "f\n"]])])
    assert all(line.isprintable() for line in lines(found[0], found))


def test_for_scripts_a_group_is_plain_values():
    (group,) = groups([rank(1, SLEEP)])
    assert group.to_json() == {
        "ranks": [1], "nodes": ["node-0"], "step": 4, "quiet_s": 1.0, "waits": True, "why": "",
        "frames": [{"file": "t.py", "line": 2, "function": "train"}],
    }  # fmt: skip
