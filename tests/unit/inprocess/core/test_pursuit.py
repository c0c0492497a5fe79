"""The pursuit of an interrupt: every sight, every grace, and what may never happen."""

import dataclasses
import itertools
import random

import pytest

from everstep.inprocess.core.pursuit import ESCALATION, RULES, Chase, Look, Patience, Sight, Verdict, sight, step

PATIENCE = Patience(settle_s=0.1, grace_s=1.0, defer_s=30.0)
DEEP, SHALLOW = (1, 2, 3, 4), (1, 2)


def look(stack=DEEP, raised=1, handling=True, deferred=False):
    return Look(stack, raised, handling, deferred)


UNHEARD = look(raised=0, handling=False)
SWALLOWED = look(handling=False)
HANDLED = look()
LEFT = look(stack=(), handling=False)
DEFERRED = look(raised=0, handling=False, deferred=True)
ALL = {
    Sight.LEFT: LEFT,
    Sight.DEFERRED: DEFERRED,
    Sight.UNHEARD: UNHEARD,
    Sight.HANDLED: HANDLED,
    Sight.SWALLOWED: SWALLOWED,
}


def run(looks, tick=0.1, patience=PATIENCE):
    """Feed looks, one a tick; return [(time, verdict)] of all that is not KEEP, and the chase."""
    chase, said = Chase.begin(7, 0.0), []
    for n, seen in enumerate(looks, start=1):
        now = round(n * tick, 6)
        chase, verdict = step(chase, seen, now, patience)
        if verdict is not Verdict.KEEP:
            said.append((now, verdict))
    return said, chase


def test_every_sight_has_a_rule():
    assert set(RULES) == set(Sight)


@pytest.mark.parametrize("expected", list(Sight))
def test_sights_are_told_apart(expected):
    assert sight(Chase.begin(0, 0.0), ALL[expected]) is expected


def test_an_import_counts_before_all_but_leaving():
    assert sight(Chase.begin(0, 0.0), look(deferred=True)) is Sight.DEFERRED
    assert sight(Chase.begin(0, 0.0), look(stack=(), deferred=True)) is Sight.LEFT


def test_a_function_that_is_left_is_let_be():
    assert run([HANDLED] + [LEFT] * 300)[0] == []


def test_handling_that_stands_still_is_pressed_after_doubling_graces():
    said, _ = run([HANDLED] * 100)
    assert [v for _, v in said[:3]] == list(ESCALATION)
    assert [t for t, _ in said[:3]] == pytest.approx([1.1, 3.1, 7.1], abs=0.11)


def test_once_given_up_it_stays_given_up():
    said, _ = run([HANDLED] * 200)
    assert {v for _, v in said[2:]} == {Verdict.REPLACE}


def test_unwinding_that_moves_is_never_pressed():
    frames = tuple(range(200))
    looks = [look(stack=frames[: 200 - n]) for n in range(150) for _ in range(5)]
    assert run(looks)[0] == []


def test_new_frames_inside_clean_up_are_no_progress():
    looks = [look(stack=(*DEEP, 100 + n)) for n in range(40)]
    said, _ = run(looks)
    assert [v for _, v in said] == [Verdict.AGAIN, Verdict.SEVER]


@pytest.mark.parametrize("seen", [UNHEARD, SWALLOWED])
def test_unheard_and_swallowed_are_sent_again_after_settling(seen):
    said, chase = run([seen])
    assert said == [(0.1, Verdict.AGAIN)]
    assert chase.sent_s == 0.1


def test_settling_is_awaited():
    chase = Chase.begin(0, 0.0)
    assert step(chase, SWALLOWED, 0.05, PATIENCE)[1] is Verdict.KEEP


def test_swallowing_for_ever_is_given_up():
    looks = [look(raised=n, handling=False) for n in range(1, 200)]
    said, _ = run(looks)
    first = next(t for t, v in said if v is Verdict.REPLACE)
    assert first == pytest.approx(7.1, abs=0.11)
    assert Verdict.SEVER in {v for t, v in said if t < first}


def test_swallowed_then_left_ends_the_chase():
    assert [v for _, v in run([SWALLOWED, LEFT, LEFT])[0]] == [Verdict.AGAIN]


def test_deferral_is_waited_for_up_to_its_limit():
    said, _ = run([DEFERRED] * 350)
    assert said[0] == (30.1, Verdict.REPLACE)


def test_deferral_stops_the_graces():
    said, _ = run([DEFERRED] * 250 + [HANDLED] * 9)
    assert said == []


def test_after_a_deferral_it_is_sent_again_at_once():
    said, _ = run([DEFERRED] * 20 + [UNHEARD])
    assert said == [(2.1, Verdict.AGAIN)]


def test_a_second_deferral_has_its_own_limit():
    said, _ = run([DEFERRED] * 200 + [HANDLED] + [DEFERRED] * 200)
    assert [v for _, v in said if v is Verdict.REPLACE] == []


@pytest.mark.sample(100)
@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_seen_the_rules_hold(seed):
    """No raise while handling within a grace; bounded life; KEEP whenever the function is left or defers."""
    dice = random.Random(seed)
    chase, now, raised = Chase.begin(0, 0.0), 0.0, 0
    pressed_s = 0.0
    for _ in range(300):
        now += dice.choice([0.01, 0.1, 0.1, 0.3])
        raised += dice.random() < 0.2
        depth = dice.randint(0, 5)
        seen = Look(tuple(range(depth)), raised, dice.random() < 0.5, dice.random() < 0.1)
        what = sight(chase, seen)
        after, verdict = step(chase, seen, now, PATIENCE)
        if what is Sight.LEFT:
            assert verdict is Verdict.KEEP
        if what is Sight.DEFERRED:
            assert verdict in (Verdict.KEEP, Verdict.REPLACE)
        if what is Sight.HANDLED and verdict is Verdict.AGAIN:
            assert now - pressed_s >= PATIENCE.grace_s
        if verdict in (Verdict.AGAIN, Verdict.SEVER):
            pressed_s = now
            assert after.sent_s == now
            assert after.raised == seen.raised
        assert after.rounds >= chase.rounds
        assert len(after.held or ()) <= len(chase.held if chase.held is not None else seen.stack)
        chase = after


@pytest.mark.parametrize(("settle", "grace"), list(itertools.product([0.02, 0.1], [0.2, 1.0, 3.0])))
def test_a_thread_that_never_hears_is_given_up_after_two_graces(settle, grace):
    patience = dataclasses.replace(PATIENCE, settle_s=settle, grace_s=grace)
    said, _ = run([UNHEARD] * 1000, tick=0.05, patience=patience)
    first = next(t for t, v in said if v is Verdict.REPLACE)
    assert first == pytest.approx(2 * grace, abs=0.25)
