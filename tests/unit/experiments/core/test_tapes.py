"""What became of a fault is read off the ranks' own lines, and a rank that was lost is never left out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.experiments.core.tapes import Ending, judge, read

DONE = Ending(wall_s=5.0, codes=(0, 0))


def line(at, what, pid, generation=-1, rank=0, world=2, text=""):
    return json.dumps(
        {"t": at, "is": what, "pid": pid, "gen": generation, "rank": rank, "world": world}
        | ({"text": text} if text else {})
    )


def generation(number, begin, pids, world=None):
    """Every rank of a generation enters, has its group, and steps, a hundredth apart."""
    world = len(pids) if world is None else world
    return [
        line(begin + 0.1 * part + 0.01 * rank, what, pid, number, rank, world)
        for rank, pid in enumerate(pids)
        for part, what in enumerate(("enter", "group", "step"))
    ]


def ran(lines, ending=DONE):
    return judge(read(["\n".join(lines)]), ending)


def test_a_fault_is_over_when_the_slowest_rank_has_stepped():
    lines = [*generation(0, 0.0, [10, 11]), line(1.0, "fault", 11, 0, 1), *generation(1, 1.5, [10, 11])]
    run = ran([*lines, line(3.0, "done", 10, 1), line(3.0, "done", 11, 1)])
    (found,) = run.recoveries
    assert [round(x, 6) for x in (found.enter_s, found.group_s, found.step_s)] == [0.51, 0.61, 0.71]
    assert (found.world, found.world_after, found.bystanders_lost) == (2, 2, 0)
    assert (run.outcome, run.done) == ("done", 2)


def test_a_rank_that_has_not_stepped_leaves_the_fault_open():
    lines = [*generation(0, 0.0, [10, 11]), line(1.0, "fault", 11, 0, 1), *generation(1, 1.5, [10], world=2)]
    run = ran(lines, Ending(90.0, (None, None), silent_s=60.0))
    assert run.recoveries[0].step_s is None
    assert run.outcome == "no new step within 60 s of the fault"


def test_a_world_that_shrank_is_over_and_says_so():
    lines = [*generation(0, 0.0, [10, 11, 12, 13]), line(1.0, "fault", 11, 0, 1, 4), *generation(1, 91.0, [10, 11, 13])]
    run = ran([*lines, *(line(95.0, "done", pid, 1) for pid in (10, 11, 13))])
    (found,) = run.recoveries
    assert found.step_s == pytest.approx(90.22)
    assert (found.world, found.world_after, found.bystanders_lost) == (4, 3, 1)
    assert run.outcome == "done"


def test_who_was_killed_is_no_bystander_and_its_spare_takes_its_place():
    lines = [*generation(0, 0.0, [10, 11]), line(1.0, "fault", 11, 0, 1), *generation(1, 1.2, [10, 99])]
    (found,) = ran(lines).recoveries
    assert (found.world_after, found.bystanders_lost) == (2, 0)


def test_a_generation_in_which_nobody_stepped_is_passed_over():
    lines = [*generation(0, 0.0, [10, 11]), line(1.0, "fault", 11, 0, 1), line(1.1, "enter", 10, 1)]
    (found,) = ran([*lines, *generation(2, 2.0, [10, 11])]).recoveries
    assert found.step_s == pytest.approx(1.21)


def test_several_faults_each_have_their_own_figure():
    lines = generation(0, 0.0, [10, 11])
    for number in range(3):
        lines += [line(number + 0.9, "fault", 11, number, 1), *generation(number + 1, number + 1.0, [10, 11])]
    assert [round(r.step_s, 6) for r in ran(lines).recoveries] == [0.31, 0.31, 0.31]


@pytest.mark.parametrize(
    ("marks", "ending", "outcome"),
    [
        ([], Ending(9.0, (None, None), silent_s=8.0), "no end within 8 s"),
        ([], Ending(9.0, (1, None)), "ended early, exit codes 1, ?"),
        ([line(1, "failed", 10, 0, text="no key")], Ending(9.0, (1,)), "ended early, exit codes 1 (no key)"),
    ],
)  # fmt: skip
def test_a_run_without_its_end_says_what_was_seen(marks, ending, outcome):
    assert ran(marks, ending).outcome == outcome


def test_lines_that_are_torn_or_not_ours_are_left_out():
    whole = line(1.0, "enter", 10, 0)
    assert len(read([whole + "\n" + whole[:20], "nonsense\n[]\n3\n" + whole])) == 2


@given(
    world=st.integers(1, 6),
    faults=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5),
    missing=st.integers(0, 40),
    data=st.randoms(use_true_random=False),
)
def test_a_figure_stands_for_all_ranks_whatever_the_order_of_the_lines(world, faults, missing, data):
    pids = list(range(100, 100 + world))
    lines, now = generation(0, 0.0, pids), 1.0
    for number, took in enumerate(faults):
        lines += [line(now, "fault", pids[-1], number, world - 1, world), *generation(number + 1, now + took, pids)]
        now += took + 1.0
    steps = [text for text in lines if '"step"' in text and '"gen": 0' not in text]
    gone = steps[missing] if missing < len(steps) else None
    lines = [text for text in lines if text != gone]
    data.shuffle(lines)
    found = judge(read(lines), DONE).recoveries
    assert len(found) == len(faults)
    open_one = json.loads(gone)["gen"] - 1 if gone is not None else None
    for number, (recovery, took) in enumerate(zip(found, faults, strict=True)):
        if number == open_one:  # a later generation stands for it only where nobody at all stepped in its own
            assert recovery.step_s is None or world == 1
        else:
            assert recovery.step_s == pytest.approx(took + 0.2 + 0.01 * (world - 1))
