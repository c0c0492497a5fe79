"""What a rank's own monitor holds against it: every clock by itself, and the one that is the furthest over is told."""

from dataclasses import replace

import pytest

from everstep.launcher.core.learned import Learned
from everstep.launcher.core.limits import LOOP_S, Own, View, judge, limit_of
from everstep.launcher.core.memory import Glance, Memory
from everstep.launcher.core.monitors import Watched, claim

BARE = Watched(100.0, 0, 0.0, 0.0, 0.0, 100.0, 0.0, 0)
BEATING = replace(BARE, beats=3, beat_s=110.0, initial_s=30.0, subsequent_s=3.0)
VIEW = View(0, 0, 0.0, "none", 0.0, 0, "S", 0.0)


@pytest.mark.parametrize(
    ("watched", "now", "expected"),
    [
        (BARE, 10_000.0, None),
        (replace(BARE, initial_s=30.0), 120.0, ("no first heartbeat", 20.0, 30.0)),
        (replace(BARE, initial_s=30.0, events=1), 200.0, None),
        (BEATING, 112.0, ("no heartbeat", 2.0, 3.0)),
        (replace(BEATING, subsequent_s=0.0), 10_000.0, None),
        (replace(BARE, outside_limit_s=9.0), 105.0, ("no section is open", 5.0, 9.0)),
        (replace(BARE, outside_s=0.0, outside_limit_s=9.0, sections=(("a", 100.0, 0.0),)), 10_000.0, None),
        # the first has expired, the last has not (W27)
        (replace(BARE, outside_s=0.0, sections=(("a", 100.0, 5.0), ("b", 104.0, 60.0))), 106.0,
         ("section 'a' is open", 6.0, 5.0)),
        (replace(BARE, outside_s=0.0, sections=(("a", 100.0, 60.0), ("b", 101.0, 4.0))), 106.0,
         ("section 'b' is open", 5.0, 4.0)),
        # a heartbeat that is later than any section
        (replace(BEATING, outside_s=0.0, sections=(("a", 100.0, 60.0),)), 120.0, ("no heartbeat", 10.0, 3.0)),
        # between the two stores of a close, and of an open
        (replace(BARE, outside_s=105.0, outside_limit_s=1.0, sections=(("a", 100.0, 60.0),)), 106.5,
         ("section 'a' is open", 6.5, 60.0)),
        (replace(BARE, outside_s=0.0, outside_limit_s=1.0), 10_000.0, None),
    ],
)  # fmt: skip
def test_which_silence_is_held_against_a_rank(watched, now, expected):
    found = claim(watched, now)
    assert (None if found is None else (found.what, found.quiet_s, found.limit_s)) == expected


def test_time_in_which_nobody_looked_is_no_silence():
    assert claim(BEATING, 130.0).quiet_s == 20.0
    assert claim(BEATING, 130.0, [(125.0, 14.0)]).quiet_s == 6.0
    assert claim(BEATING, 130.0, [(115.0, 60.0)]).quiet_s == 15.0, "the gap began before the heartbeat"
    assert claim(BEATING, 130.0, [(109.0, 60.0)]).quiet_s == 20.0, "the gap was over before it"


GLANCE = Glance(0, 0, 0, 0, "none", 110.0, 0.0, "S", 0.0, watched=BEATING, deaf=True)


def test_a_gap_between_looks_is_left_out_of_all_of_its_clocks():
    memory = Memory().look([GLANCE], 110.0).look([GLANCE], 110.2).look([GLANCE], 170.0)
    view = memory.views(170.0)[0]
    assert view.monitor_s == pytest.approx(1.2)
    assert (view.monitor, view.monitor_limit_s, view.monitor_firm, view.deaf) == ("no heartbeat", 3.0, False, True)


STEP = replace(VIEW, phase="step", step=50, steps_here=20, silent_s=7.0, still_s=7.0)
SAVES = replace(STEP, monitor="section 'save' is open", monitor_s=7.0, monitor_limit_s=600.0, monitor_firm=True)
FAST = Learned(worst_first_s=3.0).stepped(0.5, 10)


@pytest.mark.parametrize(
    ("view", "own", "expected"),
    [
        (STEP, Own(), (7.0, 5.0)),  # what is learned
        (SAVES, Own(), (7.0, 600.0)),  # the script says how long its section may be
        (SAVES, Own(soft_s=6.0), (7.0, 6.0)),  # and the operator comes before it
        (replace(STEP, monitor="no heartbeat", monitor_s=7.0, monitor_limit_s=2700.0), Own(), (7.0, 5.0)),
        (replace(STEP, monitor="no heartbeat", monitor_s=4.5, monitor_limit_s=4.0, silent_s=1.0, still_s=1.0), Own(),
         (4.5, 4.0)),
        (replace(STEP, phase="none", monitor="no heartbeat", monitor_s=1.0, monitor_limit_s=4.0), Own(), (1.0, 4.0)),
        (replace(STEP, phase="paused", monitor="no heartbeat", monitor_s=9.0, monitor_limit_s=4.0), Own(), (0.0, 0.0)),
        (replace(STEP, phase="waiting", monitor="no heartbeat", monitor_s=9.0, monitor_limit_s=4.0), Own(), (0.0, 0.0)),
        (replace(STEP, phase="declared", limit_s=60.0, monitor="no heartbeat", monitor_s=9.0, monitor_limit_s=4.0),
         Own(), (7.0, 60.0)),
    ],
)  # fmt: skip
def test_which_limit_applies_where_a_monitor_says_one_too(view, own, expected):
    limit = limit_of(view, FAST, own)
    assert (limit.quiet_s, limit.limit_s) == expected


def ranks(*monitors: float, limit_s: float = 5.0, **changes: object) -> list[View]:
    """Ranks of a script that knows nothing of us, and how long their monitors have been waiting."""
    return [replace(VIEW, rank=r, monitor="no heartbeat", monitor_s=s, monitor_limit_s=limit_s, deaf=True, **changes)
            for r, s in enumerate(monitors)]  # fmt: skip


def verdicts(views):
    return [(v.rank, v.action) for v in judge(views, Learned(), Own())]


def test_a_script_that_knows_nothing_of_us_is_asked_when_it_is_overdue_and_not_before():
    assert verdicts(ranks(4.9, 4.9)) == []
    assert verdicts(ranks(5.1, 4.9)) == [(0, "probe")]
    assert verdicts(ranks(5.1, 5.2)) == [(0, "probe"), (1, "probe")]


def test_the_culprit_is_who_waits_for_nobody():
    waits, hangs = ranks(5.4, 5.4)
    both = [replace(waits, waiting=True), replace(hangs, waiting=False)]
    (found,) = judge(both, Learned(), Own())
    assert (found.rank, found.action) == (1, "interrupt")
    assert found.reason == "no heartbeat for 5.4 s, idle; limit 5.0 s"
    assert verdicts([replace(waits, waiting=False, beats=9), replace(hangs, waiting=False, beats=8)]) == [
        (1, "interrupt")
    ]


def test_one_that_is_stopped_or_does_not_answer_is_named_as_such():
    stopped, deaf = ranks(5.4, 7.0)
    (found, other) = judge(
        [replace(stopped, state="T", probe_age_s=0.3), replace(deaf, probe_age_s=1.6)], Learned(), Own()
    )
    assert (found.rank, found.action) == (0, "kill")
    assert found.reason == "stopped (state T); no heartbeat for 5.4 s; limit 5.0 s"
    assert other.reason.endswith("no heartbeat for 7.0 s; limit 5.0 s")


def test_who_waits_for_a_rank_in_a_long_section_is_not_judged_before_it_but_not_for_ever():
    waits = replace(ranks(6.0)[0], waiting=True)
    saves = replace(ranks(0.0, 100.0, limit_s=600.0)[1], monitor="section 'save' is open")
    assert verdicts([waits, saves]) == []
    assert verdicts([replace(waits, monitor_s=604.0), saves]) == []
    assert verdicts([replace(waits, monitor_s=606.0), saves]) == [(0, "interrupt")]
    assert verdicts([waits, replace(saves, monitor_s=601.0)]) == [(1, "probe")]


def test_no_limit_is_no_alarm_however_long():
    views = [replace(VIEW, rank=r, silent_s=10 * LOOP_S, still_s=10 * LOOP_S, deaf=True) for r in range(2)]
    assert judge(views, Learned(), Own()) == ()
