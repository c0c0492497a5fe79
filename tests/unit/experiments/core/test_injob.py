"""Rows and budgets of the in-job benchmark, from tapes and figures that are written here."""

import pytest

from everstep.experiments.core import injob
from everstep.experiments.core.tapes import Ending, judge, read


def tape(*lines):
    return read(
        f'{{"t": {at}, "is": "{what}", "pid": {pid}, "gen": {gen}, "rank": {rank}, "world": 2}}'
        for at, what, pid, gen, rank in lines
    )


RUN = judge(
    tape(
        (0.0, "enter", 10, 0, 0), (0.1, "enter", 11, 0, 1), (1.0, "step", 10, 0, 0), (1.0, "step", 11, 0, 1),
        (2.0, "fault", 11, 0, 1),
        (2.1, "enter", 12, 1, 0), (2.15, "enter", 13, 1, 1), (2.2, "step", 12, 1, 0), (2.25, "step", 13, 1, 1),
        (3.0, "done", 12, 1, 0), (3.0, "done", 13, 1, 1),
    ),
    Ending(3.5, (0,)),
)  # fmt: skip


def row(way, recovery, began, noticed=0.0, fault="sigkill", over=1):
    return {
        "way": way, "fault": fault, "ranks": 2, "faults": 1, "recovered": over, "recovery_s": [recovery] * 3,
        "began_s": [began] * 3, "noticed_s": [noticed] * 3 if noticed else None,
    }  # fmt: skip


def judged(restarts=(), launches=(), idle=()):
    found = injob.verdicts({"restarts": restarts, "launches": launches, "idle": idle})
    return [(verdict["budget_kept"], verdict["budget"]) for verdict in found]


def test_a_row_splits_a_restart_at_the_script_s_first_line():
    found = injob.restart_row("unwrapped", "sigkill", 2, [RUN], [0.01], 0)
    assert (found["faults"], found["recovered"], found["outcomes"]) == (1, 1, {"done": 1})
    assert [round(found[name][0], 3) for name in ("recovery_s", "noticed_s", "began_s", "own_s")] == [
        0.25, 0.01, 0.15, 0.1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("restarts", "expected"),
    [
        ([row("unwrapped", 3.0, 0.21, 0.02)], [(True, "its first line within 0.2 s of the notice")]),
        ([row("unwrapped", 3.0, 0.21)], [(False, "0.210 s after it was noticed, promised 0.2")]),
        ([row("spare", 5.15, 5.14, 5.0, "hang")], [(True, "its first step within 0.2 s of the notice")]),
        ([row("spare", 0.3, 0.1)], [(False, "0.300 s after it was noticed, promised 0.2")]),
        (
            [row("unwrapped", 1.0, 0.1), row("ft_launcher", 3.0, 0.3)],
            [(False, "0.33 of ft_launcher's time, promised 0.25")],
        ),
        ([row("unwrapped", 1.0, 0.1), row("ft_launcher", 3.0, 0.3, fault="hang")],
         [(True, "its first line within 0.2 s of the notice")]),
        ([row("unwrapped", 1.0, 0.1, over=0)], [(False, "0 of 1 faults were over")]),
        ([row("torchrun", 9.0, 9.0), row("cold", 9.0, 9.0)], []),
    ],
)  # fmt: skip
def test_a_restart_is_judged_by_its_way(restarts, expected):
    assert judged(restarts) == expected


def test_an_end_and_a_rest_have_their_budgets():
    assert judged(launches=[{"way": "unwrapped", "ranks": 8, "end_s": [0.2] * 3}]) == [(True, "ended within 0.2 s")]
    assert judged(launches=[{"way": "unwrapped", "ranks": 8, "end_s": [0.3] * 3}])[0][0] is False
    assert judged(launches=[{"way": "torchrun", "ranks": 8, "end_s": [9.0] * 3}]) == []
    assert judged(idle=[{"way": "unwrapped", "ranks": 2, "cpu_share": 0.011}]) == [
        (False, "1.10% of a core, promised less than 1%")
    ]
    assert judged(idle=[{"way": "unwrapped", "ranks": 2, "cpu_share": 0.004}])[0][0] is True
