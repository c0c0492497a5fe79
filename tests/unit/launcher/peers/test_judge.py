"""The hub's judgement of silence: looks age, an incomplete world is not judged, one verdict a generation."""

import pytest

from everstep.launcher.peers.core.books import JUMP_S
from everstep.launcher.peers.core.judge import Judge

SETTINGS = {"soft_s": 4.0, "first_s": None, "automatic": False}


def published(generation, size):
    return {"is": "Published", "roster": {"generation": generation, "members": [[r, f"b-{r}-1"] for r in range(size)]}}


def view(rank, generation=0, silent_s=0.0, **other):
    fields = {
        "rank": rank, "step": 9, "silent_s": silent_s, "still_s": silent_s, "phase": "step", "limit_s": 0.0,
        "steps_here": 9, "state": "S", "cpu_share": 0.0, "probe_age_s": None, "waiting": None, "name": "",
    }  # fmt: skip
    return {"generation": generation, "lessons": [], "view": fields | other}


def begun(size=2, **settings):
    judge = Judge.of(SETTINGS | settings)
    judge.hear(published(0, size))
    judge.look(0.0)
    return judge


def run(judge, until, since=0.0, **of_rank_1):
    """Rank 0 waits in a collective, rank 1 is as told; both are seen once a second. Return every order."""
    orders, now = [], since
    while now < until:
        now += 1.0
        judge.take(view(0, silent_s=now - since, waiting=True), now)
        judge.take(view(1, silent_s=now - since, **of_rank_1), now)
        orders += [(now, message["kind"], rank, message.get("action")) for message, rank in judge.look(now)]
    return orders


def test_it_asks_first_and_then_names_the_one_that_does_not_wait():
    asked = run(begun(), 3.0)
    assert ("probe", 1) in {(kind, rank) for _, kind, rank, _ in asked}
    judge = begun()
    assert [o[1:] for o in run(judge, 20.0, waiting=False) if o[1] == "condemn"] == [("condemn", 1, "interrupt")]


def test_a_stopped_process_is_ended():
    orders = run(begun(), 20.0, state="T", probe_age_s=5.0)
    assert ("condemn", 1, "kill") in [o[1:] for o in orders]


def test_nobody_is_judged_before_all_are_seen_or_after_the_first_fault():
    judge = begun(3)
    assert run(judge, 20.0, waiting=False) == []
    judge = begun()
    judge.hear({"is": "Faulted", "fault": {"generation": 0}})
    assert run(judge, 20.0, waiting=False) == []
    judge.hear(published(1, 2))
    assert run(judge, 40.0, since=20.0, waiting=False) == []  # what is seen is of the generation before


def test_the_end_is_not_judged():
    judge = begun()
    judge.hear({"is": "Published", "roster": {"generation": 1, "members": []}})
    assert run(judge, 20.0, waiting=False) == []


def test_a_limit_of_a_script_s_own_ages_too_and_is_not_raised():
    """A heartbeat that does not come: seen last 2 s before its limit was over."""
    judge = begun()
    monitor = {"phase": "none", "monitor": "no heartbeat", "monitor_limit_s": 4.0, "deaf": True, "place": "x.py:3"}
    judge.take(view(0, **monitor, monitor_s=2.0, waiting=True), 1.0)
    judge.take(view(1, **monitor, monitor_s=2.0, waiting=False), 1.0)
    assert judge.look(2.5) == []
    ((message, rank),) = judge.look(3.5)
    assert (message["kind"], rank) == ("condemn", 1)
    assert message["text"] == "no heartbeat for 4.5 s, idle; limit 4.0 s"
    assert judge.learned.raised_s == 0


def test_a_look_ages_while_it_lies_here():
    judge = begun()
    judge.take(view(0, waiting=True), 1.0)
    judge.take(view(1, waiting=False), 1.0)
    for now in (2.0, 3.0, 4.0, 5.0):
        assert judge.look(now) == []
    assert [message["kind"] for message, _ in judge.look(5.5)] == ["condemn"]


def test_a_time_in_which_the_hub_did_not_run_is_not_silence():
    judge = begun()
    for rank in (0, 1):
        judge.take(view(rank, waiting=bool(rank)), 1.0)
    judge.look(1.0)
    assert judge.look(1.0 + JUMP_S + 20.0) == []


def test_who_moved_at_the_last_look_is_taken_to_move_until_the_next():
    judge = begun(soft_s=None)
    for now in range(1, 40):
        judge.take(view(0, silent_s=now, step=8) | {"view": view(0, silent_s=now)["view"] | {"still_s": 0.1}}, now)
        judge.take(view(1, silent_s=now, waiting=False, cpu_share=1.0), now)
        assert [m for m, _ in judge.look(now + 0.95) if m["kind"] == "condemn"] == []


def test_legitimate_silence_teaches_and_a_hang_gives_ten_times_the_time():
    judge = begun(soft_s=None)
    lessons = [["step", "", 3.0, 10], ["set-up", "", 7.0, 0], ["silence", "a.py:1 in f", 4.0, 0]]
    judge.take(view(1) | {"lessons": lessons}, 0.5)
    assert (judge.learned.typical_s, judge.learned.worst_first_s) == (0.3, 7.0)
    assert judge.learned.worst_at("a.py:1 in f") == 4.0
    orders = run(judge, 60.0, waiting=False, place="a.py:1 in f")
    assert [o[1:] for o in orders if o[1] == "condemn"] == [("condemn", 1, "interrupt")]
    assert judge.learned.raised(9, "") == judge.learned.raised(70, "a.py:1 in f") == 80.0


@pytest.mark.parametrize(
    "late",
    [
        {"is": "Faulted", "fault": {"generation": 0}},
        {"is": "gone", "incarnation": "b-2-1"},
        {"is": "Died", "incarnation": "b-2-1"},
        {"is": "Wedged", "incarnation": "b-2-1"},
    ],
)
def test_what_is_told_late_of_an_earlier_generation_does_not_end_the_watch(late):
    """A victim speaks after its cause; the smaller world that went on without the dead was never watched again."""
    judge = begun(3)
    judge.hear({"is": "Died", "incarnation": "b-2-1"})
    judge.hear(published(1, 2))
    judge.hear(late)
    orders = []
    for now in range(1, 20):
        judge.take(view(0, generation=1, silent_s=now, waiting=True), now)
        judge.take(view(1, generation=1, silent_s=now, waiting=False), now)
        orders += judge.look(now)
    assert [(message["kind"], rank) for message, rank in orders if message["kind"] == "condemn"] == [("condemn", 1)]


@pytest.mark.parametrize(
    "told",
    [
        {"is": "Faulted", "fault": {"generation": 1}},
        {"is": "gone", "incarnation": "b-1-1"},
        {"is": "EndRequested", "code": 1, "reason": "asked"},
    ],
)
def test_what_ends_this_generation_ends_its_watch(told):
    judge = begun()
    judge.hear(published(1, 2))
    judge.hear(told)
    for now in range(1, 20):
        judge.take(view(0, generation=1, silent_s=now, waiting=True), now)
        judge.take(view(1, generation=1, silent_s=now, waiting=False), now)
        assert judge.look(now) == []
