"""When silence is a hang: every rule of launcher/core/limits.py has its cases here."""

from dataclasses import replace

import pytest

from everstep.launcher.core.limits import (
    BUSY_FLOOR_S,
    CEILING_S,
    FIRST_CEILING_S,
    IDLE_FLOOR_S,
    LEARN_STEPS,
    Learned,
    Own,
    Verdict,
    View,
    judge,
    soft_limit,
)

STEP = View(
    rank=0, step=50, silent_s=0.1, phase="step", limit_s=0.0, steps_here=20, state="S", cpu_share=0.0, waiting=None
)
FAST = Learned(worst_gap_s=0.05, worst_first_s=3.0)


def world(*silent: float, **changes: object) -> list[View]:
    """Ranks that are alike but for how long they have been silent."""
    return [replace(STEP, rank=r, silent_s=s, **changes) for r, s in enumerate(silent)]


def actions(views: list[View], learned: Learned = FAST, own: Own | None = None) -> list[tuple[int, str]]:
    return [(v.rank, v.action) for v in judge(views, learned, own or Own())]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (STEP, IDLE_FLOOR_S),
        (replace(STEP, cpu_share=0.9), BUSY_FLOOR_S),
        (replace(STEP, steps_here=LEARN_STEPS - 1), CEILING_S),
        (replace(STEP, phase="first"), CEILING_S),
        (replace(STEP, phase="paused"), 0.0),
        (replace(STEP, phase="waiting"), 0.0),
        (replace(STEP, phase="none"), 0.0),
        (replace(STEP, phase="declared"), 0.0),
        (replace(STEP, phase="declared", limit_s=7.0), 7.0),
    ],
)
def test_each_phase_has_its_limit(view, expected):
    assert soft_limit(view, FAST, Own()) == expected


def test_nothing_is_learned_yet_so_the_first_step_may_take_its_time():
    assert soft_limit(replace(STEP, phase="first"), Learned(), Own()) == FIRST_CEILING_S


def test_the_limit_is_never_below_the_longest_legitimate_gap():
    for gap in (0.01, 0.5, 3.0, 10.0, 29.0, 31.0, 400.0):
        limit = soft_limit(STEP, Learned(worst_gap_s=gap), Own())
        assert limit > gap
        assert limit >= IDLE_FLOOR_S


def test_the_operators_value_wins():
    assert soft_limit(STEP, FAST, Own(soft_s=1.5)) == 1.5
    assert soft_limit(replace(STEP, steps_here=0), FAST, Own(soft_s=200.0)) == 200.0


@pytest.mark.parametrize(
    ("learned", "own", "expected"),
    [
        (Learned(), Own(soft_s=2.0), FIRST_CEILING_S),  # a limit for steps is none for set-up (HD-01)
        (Learned(), Own(soft_s=2.0, first_s=10.0), 10.0),
        (FAST, Own(first_s=0.5), 0.5),
        (FAST, Own(soft_s=2.0), CEILING_S),
        (FAST, Own(soft_s=100.0), 100.0),
        (Learned(worst_first_s=50.0), Own(), 150.0),
        (Learned(worst_first_s=500.0), Own(soft_s=2.0), FIRST_CEILING_S),
        (FAST.hung(50), Own(), 2 * CEILING_S),
    ],
)
def test_set_up_and_the_first_step_have_a_limit_of_their_own(learned, own, expected):
    assert soft_limit(replace(STEP, phase="first"), learned, own) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phase": "first", "step": 0}, "9.0 s in set-up or the first step, idle; limit 8.0 s"),
        ({"phase": "first"}, "9.0 s in set-up or the first step, after step 50, idle"),
        (
            {"phase": "declared", "limit_s": 6.0, "name": "eval"},
            "9.0 s in the phase 'eval', after step 50, idle; limit 6.0",
        ),
    ],
)
def test_a_reason_names_the_phase(changes, words):
    view = replace(STEP, silent_s=9.0, waiting=False, **changes)
    assert words in judge([view], FAST, Own(first_s=8.0))[0].reason


def test_a_step_that_hung_gets_twice_the_time_until_it_has_passed():
    hung = FAST.hung(50)
    assert soft_limit(STEP, hung, Own()) == 2 * IDLE_FLOOR_S
    assert soft_limit(STEP, hung.hung(50), Own()) == 4 * IDLE_FLOOR_S
    assert soft_limit(replace(STEP, step=51), hung.passed(51), Own()) == IDLE_FLOOR_S
    assert hung.passed(50) == hung


def test_silence_below_the_limit_is_nothing():
    assert actions(world(0.1, 2.0)) == []


def test_half_way_to_the_limit_a_rank_is_asked_whether_it_hears_us():
    assert actions(world(0.1, 2.6)) == [(1, "probe")]
    assert actions(world(0.1, 2.6, probe_age_s=0.3)) == []


def test_nobody_is_judged_before_an_answer_or_its_absence():
    assert actions(world(6.0, 6.0)) == [(0, "probe"), (1, "probe")]
    assert actions(world(6.0, 6.0, probe_age_s=0.5)) == []


def test_the_culprit_is_the_one_who_does_not_wait_for_others():
    views = world(6.0, 6.1)
    views = [replace(views[0], waiting=True), replace(views[1], waiting=False)]
    assert actions(views) == [(1, "interrupt")]
    assert "after step 50" in judge(views, FAST, Own())[0].reason


def test_who_waits_is_not_judged_before_the_one_waited_for():
    """A busy step of 7 s is slow and not hung, also where its peers wait idle; and the sleeper came to it later."""
    busy = [replace(v, waiting=v.rank == 0, cpu_share=0.9 * v.rank) for v in world(7.0, 7.0)]
    assert actions(busy) == []
    assert actions([replace(v, silent_s=11.0) for v in busy]) == [(1, "interrupt")]
    late = [replace(v, waiting=v.rank == 0) for v in world(5.2, 4.9)]
    assert actions(late) == []
    assert actions([replace(v, silent_s=v.silent_s + 0.2) for v in late]) == [(1, "interrupt")]
    unasked = [replace(late[0]), replace(late[1], waiting=None)]
    assert actions(unasked) == [(1, "probe")]
    gone = [late[0], replace(late[1], phase="none")]  # it has left the loop: nothing will end the wait
    assert actions(gone) == [(0, "interrupt")]


def test_a_hang_without_a_culprit_is_charged_to_the_rank_that_is_behind():
    views = [replace(v, waiting=True, step=50 - v.rank) for v in world(6.0, 6.0, 6.0)]
    assert actions(views) == [(2, "interrupt")]


def test_no_answer_is_evidence_of_a_held_interpreter_lock():
    views = world(6.0, 6.0)
    views = [replace(views[0], waiting=True), replace(views[1], probe_age_s=2.0)]
    assert actions(views) == [(1, "kill")]


def test_a_stopped_process_is_killed():
    views = [replace(v, waiting=True) for v in world(6.0, 6.0)]
    views[1] = replace(views[1], state="T", waiting=None, probe_age_s=0.4)
    assert actions(views) == [(1, "kill")]


def test_a_busy_world_is_given_twice_the_time():
    views = [replace(v, waiting=False, cpu_share=0.9) for v in world(6.0, 6.0)]
    assert actions(views) == []
    assert actions([replace(v, silent_s=11.0) for v in views]) == [(0, "interrupt")]


@pytest.mark.parametrize("phase", ["paused", "declared", "first"])
def test_one_exempt_rank_excuses_the_world(phase):
    """Rank 0 evaluates alone for a minute, the others wait in a barrier (H1)."""
    views = [
        replace(STEP, rank=0, phase=phase, silent_s=55.0),
        *[replace(v, waiting=True) for v in world(55.0, 55.0)[1:]],
    ]
    assert actions(views) == []


def test_a_declared_phase_that_outstays_its_limit_is_the_culprit():
    views = [replace(STEP, rank=0, phase="declared", limit_s=6.0, silent_s=6.5, waiting=False)]
    views.append(replace(STEP, rank=1, silent_s=6.5, waiting=True))
    assert actions(views) == [(0, "interrupt")]
    inside = [replace(v, silent_s=5.5) for v in views]
    assert actions(inside) == []  # asked already, and inside its limit


def test_the_hard_limit_kills_without_asking_but_not_the_victims():
    views = [replace(v, waiting=v.rank == 0) for v in world(9.0, 9.0)]
    assert actions(views, own=Own(soft_s=4.0, hard_s=8.0)) == [(1, "kill")]


def test_a_reason_is_a_sentence_with_its_numbers():
    verdict = judge([replace(STEP, silent_s=6.0, waiting=False)], FAST, Own())[0]
    assert verdict == Verdict(0, "interrupt", "no progress for 6.0 s after step 50, idle; limit 5.0 s")
