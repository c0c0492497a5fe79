"""Rows, ratios, budgets and growth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.experiments.core.figures import NVRX, Case, growth, name_of, ratio, row, spread, verdict
from everstep.experiments.core.tapes import Recovery, Run

OURS = {"impl": "everstep", "launcher": "everstep"}
THEIRS = {"impl": NVRX, "launcher": "bare"}


def over(seconds, world=2, after=2, bystanders=0):
    return Recovery(0, 1, world, 0.0, seconds * 0.8, seconds * 0.9, seconds, after, bystanders)


def made(who, seconds, case=None, ledger=(), outcome="done"):
    case = case or Case("exception", 2)
    runs = [
        Run(
            tuple(over(s, case.ranks, case.ranks) if s else Recovery(0, 1, case.ranks) for s in seconds),
            2,
            9.0,
            outcome,
        )
    ]
    return row(who, case, runs, ledger)  # fmt: skip


def test_a_row_tells_medians_and_leaves_no_fault_out():
    found = made(OURS, [0.03, None, 0.05, 0.04], outcome="no new step within 9 s of the fault")
    assert (found["faults"], found["recovered"]) == (4, 3)
    assert found["recovery_s"] == [0.04, 0.03, 0.05]
    assert found["outside_s"] == pytest.approx({"back_s": 0.032, "group_s": 0.004, "step_s": 0.004})
    assert found["outcomes"] == {"no new step within 9 s of the fault": 1}
    assert found["each_s"] == [0.03, None, 0.05, 0.04]


def test_parts_that_the_ledger_did_not_reach_are_left_out():
    faults = [{"detect_s": 0.1, "stop_s": None}, {"detect_s": 0.3}]
    assert made(OURS, [0.5], ledger=faults)["parts_s"] == {"detect_s": pytest.approx(0.2)}
    assert made(OURS, [0.5])["parts_s"] is None


def test_where_the_ledger_sees_no_steps_the_way_back_from_the_stop_is_the_regroup():
    found = made(OURS, [0.5], ledger=[{"detect_s": 0.1, "stop_s": 0.05}])["parts_s"]
    assert found == pytest.approx({"detect_s": 0.1, "stop_s": 0.05, "regroup_s": 0.25})  # back after 0.4
    early = made(OURS, [0.1], ledger=[{"detect_s": 0.1, "stop_s": 0.05}])["parts_s"]
    assert early["regroup_s"] == 0.0  # medians of few need not add up


def test_the_ratio_is_of_medians():
    assert ratio(made(OURS, [0.05, 0.1, 0.2]), made(THEIRS, [1.0, 2.0, 9.0])) == pytest.approx(20)
    assert ratio(made(OURS, [0.05]), made(THEIRS, [None])) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "kept", "words"),
    [
        ([0.05], [1.0], True, "within 0.06 s"),
        ([0.05], [0.6], False, "12 times faster, promised 15"),
        ([0.07], [9.0], False, "0.070 s, promised 0.06"),
        ([0.05, None], [1.0], False, "1 of 2 faults were over"),
        ([], [1.0], False, "0 of 0 faults were over; no figure"),
        ([0.05], [None], True, "within 0.06 s"),
        ([0.05], None, True, "within 0.06 s"),
    ],
)
def test_a_budget_is_kept_or_the_reason_says_why_not(mine, theirs, kept, words):
    found = verdict(made(OURS, mine), None if theirs is None else made(THEIRS, theirs))
    assert (found.kept, found.reason) == (kept, words)


def test_a_rank_that_was_lost_breaks_a_budget_however_fast_it_was():
    lost = row(OURS, Case("exception", 4), [Run((over(0.01, 4, 3, 1),), 3, 1.0, "done")], ())
    assert verdict(lost, None).reason == "1 ranks, 1 bystanders lost"


def test_a_hang_is_judged_from_when_it_was_noticed():
    case = Case("hang", 2)
    assert verdict(made(OURS, [5.05], case, [{"detect_s": 5.0}]), None).kept
    late = verdict(made(OURS, [5.5], case, [{"detect_s": 5.0}]), None)
    assert (late.kept, late.reason) == (False, "0.500 s after noticing, promised 0.06")
    assert verdict(made(OURS, [5.5], case), None).reason == "when it was noticed is not known"


def test_what_is_not_promised_is_not_judged():
    assert verdict(made(OURS, [1.0], Case("gil", 2)), None) is None


@pytest.mark.parametrize(
    ("who", "name"),
    [
        (OURS, "everstep, native (everstep)"),
        (THEIRS | {"tuned": True}, "NVRx (bare, tuned)"),
        ({"impl": "everstep.inprocess", "launcher": "torchrun"}, "everstep.inprocess (torchrun)"),
    ],
)
def test_implementations_are_named_with_their_launcher(who, name):
    assert name_of(who) == name


@given(st.floats(0.1, 3.0), st.floats(1e-6, 1e3))
def test_growth_finds_the_exponent(power, factor):
    points = [(n, factor * n**power) for n in (64, 256, 1024, 4096)]
    assert growth(points) == pytest.approx(power, rel=1e-6)


def test_growth_and_spread_of_too_little():
    assert growth([(64, 1.0)]) is None
    assert growth([(64, 1.0), (64, 2.0)]) is None
    assert spread([]) is None
