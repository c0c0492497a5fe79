"""When silence is a hang: every rule of launcher/core/limits.py has its cases here."""

from dataclasses import replace

import pytest

from everstep.launcher.core.learned import LONGEST_S, RECENT, Learned, kind_of, place_of
from everstep.launcher.core.limits import (
    BUSY_FLOOR_S,
    CEILING_S,
    FEW_PLACES,
    FIRST_CEILING_S,
    IDLE_FLOOR_S,
    LEARN_STEPS,
    LOOP_S,
    POLL_S,
    SPIN_S,
    UNDECLARED_S,
    Limit,
    Own,
    Verdict,
    View,
    judge,
    limit_of,
)

STEP = View(
    rank=0, step=50, silent_s=4.0, still_s=4.0, phase="step", limit_s=0.0, steps_here=20, state="S", cpu_share=0.0
)
FAST = Learned(worst_first_s=3.0).stepped(0.5, 10)


def world(*silent: float, **changes: object) -> list[View]:
    """Ranks that are alike but for how long they have been silent, and stood still."""
    return [still(replace(STEP, rank=r, **changes), s) for r, s in enumerate(silent)]


def still(view: View, seconds: float) -> View:
    """It has given no sign of any kind for so long."""
    return replace(view, silent_s=seconds, still_s=seconds)


def soft_limit(view: View, learned: Learned, own: Own) -> float:
    return limit_of(view, learned, own).limit_s


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
        (replace(STEP, phase="after"), FIRST_CEILING_S),
        (replace(STEP, state="R"), BUSY_FLOOR_S),
        (replace(STEP, state="D"), BUSY_FLOOR_S),
        (replace(STEP, kind="save"), FIRST_CEILING_S),
        (replace(STEP, kind="compile", cpu_share=0.9), FIRST_CEILING_S),
        (replace(STEP, kind="batch"), POLL_S),
        (replace(STEP, kind="device"), IDLE_FLOOR_S),
        (replace(STEP, still_s=0.2), POLL_S),
        (replace(STEP, still_s=0.2, kind="save"), FIRST_CEILING_S),
        (replace(STEP, still_s=0.2, cpu_share=0.9), LOOP_S),
        (replace(STEP, still_s=0.2, cpu_share=0.9, phase="first"), LOOP_S),
        (replace(STEP, still_s=0.2, phase="after"), FIRST_CEILING_S),
        (replace(STEP, still_s=0.2, cpu_share=0.9, pinged=True), BUSY_FLOOR_S),
    ],
)
def test_each_phase_has_its_limit(view, expected):
    assert soft_limit(view, FAST, Own()) == expected


def test_nothing_is_learned_yet_so_the_first_step_may_take_its_time():
    assert soft_limit(replace(STEP, phase="first"), Learned(), Own()) == FIRST_CEILING_S


def test_the_limit_is_never_below_what_steps_take():
    for step in (0.01, 0.5, 3.0, 10.0, 29.0, 31.0, 400.0):
        limit = soft_limit(STEP, Learned().stepped(5 * step, 5), Own())
        assert limit > step
        assert limit >= IDLE_FLOOR_S


def test_one_slow_step_in_many_changes_no_limit():
    learned = Learned()
    for n in range(RECENT):
        learned = learned.stepped(40.0 if n % 20 == 0 else 0.05)
    assert soft_limit(STEP, learned, Own()) == IDLE_FLOOR_S
    assert learned.longest_s == 40.0
    assert len(learned.recent) == RECENT


def test_a_silence_that_ended_by_itself_is_allowed_where_it_was_and_nowhere_else():
    learned = FAST.silent_at("train.py:7 in evaluate", 40.0).silent_at("train.py:7 in evaluate", 10.0)
    assert soft_limit(replace(STEP, place="train.py:7 in evaluate"), learned, Own()) == 80.0
    assert soft_limit(replace(STEP, place="train.py:9 in load"), learned, Own()) == IDLE_FLOOR_S
    assert soft_limit(STEP, learned, Own()) == IDLE_FLOOR_S


def test_places_are_forgotten_oldest_first():
    learned = Learned()
    for n in range(1000):
        learned = learned.silent_at(str(n), 7.0)
    assert len(learned.places) == 256
    assert learned.worst_at("999") == 7.0
    assert learned.worst_at("0") == 0.0


def test_the_operators_value_wins():
    assert soft_limit(STEP, FAST, Own(soft_s=1.5)) == 1.5
    assert soft_limit(replace(STEP, steps_here=0), FAST, Own(soft_s=200.0)) == 200.0
    assert soft_limit(STEP, FAST.hung(50, "", 1.5), Own(soft_s=1.5)) == 1.5
    moving = replace(STEP, silent_s=9.0, still_s=0.3)
    assert limit_of(moving, FAST, Own(soft_s=8.0)) == Limit(9.0, 8.0)


def test_automatic_limits_are_about_stillness_until_ping_is_called():
    """What NVRx's soft timeout means: an interpreter that runs is a sign, unless the script gives better ones."""
    own, moving = Own(soft_s=8.0, automatic=True), replace(STEP, silent_s=9.0, still_s=0.3)
    assert not limit_of(moving, FAST, own).over
    assert limit_of(replace(moving, pinged=True), FAST, own).over
    assert limit_of(still(STEP, 9.0), FAST, own).over


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
        (FAST.hung(50, "", CEILING_S), Own(), 10 * CEILING_S),
        (FAST.hung(50, "", IDLE_FLOOR_S), Own(), CEILING_S),
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
        ({"phase": "after"}, "9.0 s after the loop of steps, after step 50, idle; limit 8.0 s"),
    ],
)
def test_a_reason_names_the_phase(changes, words):
    view = replace(still(STEP, 9.0), waiting=False, **changes)
    assert words in judge([view], FAST, Own(first_s=8.0))[0].reason


def test_an_alarm_gives_its_step_and_its_place_ten_times_the_time_until_the_step_has_passed():
    here, elsewhere = replace(STEP, place="a.py:1 in f"), replace(STEP, step=70, place="b.py:2 in g")
    hung = FAST.hung(50, "a.py:1 in f", IDLE_FLOOR_S)
    assert soft_limit(here, hung, Own()) == 10 * IDLE_FLOOR_S
    assert soft_limit(STEP, hung, Own()) == 10 * IDLE_FLOOR_S, "the step counts where the place is not known"
    assert soft_limit(replace(here, step=70), hung, Own()) == 10 * IDLE_FLOOR_S
    assert soft_limit(elsewhere, hung, Own()) == IDLE_FLOOR_S
    again = hung.hung(50, "a.py:1 in f", 10 * IDLE_FLOOR_S)
    assert soft_limit(here, again, Own()) == 100 * IDLE_FLOOR_S
    assert soft_limit(here, again.hung(50, "a.py:1 in f", 700.0), Own()) == LONGEST_S
    assert hung.passed(50) == hung
    assert soft_limit(here, hung.passed(51), Own()) == IDLE_FLOOR_S, "it was a hang"
    assert soft_limit(here, hung.silent_at("a.py:1 in f", 40.0).passed(51), Own()) == 80.0, "it was not"


TURNS = replace(STEP, undeclared=True, turns=50)
RUNS = replace(TURNS, silent_s=40.0, still_s=0.2, cpu_share=1.0)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (TURNS, Limit(4.0, IDLE_FLOOR_S)),
        (replace(TURNS, steps_here=0), Limit(4.0, UNDECLARED_S)),  # outside of the loop
        (replace(TURNS, steps_here=0, turns=0), Limit(4.0, UNDECLARED_S)),
        (replace(TURNS, steps_here=0, kind="save"), Limit(4.0, FIRST_CEILING_S)),
        (RUNS, Limit(40.0, LOOP_S)),
        (replace(RUNS, places=FEW_PLACES), Limit(40.0, SPIN_S)),
        (replace(RUNS, steps_here=0), Limit(0.2, UNDECLARED_S)),  # it runs, and nothing is known of marks
        (replace(RUNS, cpu_share=0.0), Limit(40.0, POLL_S)),
        (replace(RUNS, pinged=True), Limit(40.0, CEILING_S)),  # as NVRx's, and no sooner
        (replace(RUNS, pinged=True, still_s=4.0, silent_s=4.0), Limit(4.0, BUSY_FLOOR_S)),
    ],
)
def test_a_function_that_declares_no_steps_is_judged_by_its_loop_and_only_in_it(view, expected):
    assert limit_of(view, FAST, Own()) == expected


def test_an_explicit_limit_is_about_stillness_for_a_function_that_declares_no_steps():
    assert limit_of(RUNS, FAST, Own(soft_s=2.0, automatic=True)) == Limit(0.2, 2.0)
    assert limit_of(TURNS, FAST, Own(soft_s=200.0, automatic=True)) == Limit(4.0, 200.0), "longer than learned"


def test_a_rank_that_runs_without_a_turn_is_asked_where_it_stands():
    assert actions([replace(RUNS, silent_s=POLL_S / 2 + 1)]) == [(0, "probe")]
    assert actions([replace(RUNS, silent_s=POLL_S / 2 + 1, turns=0)]) == []


def test_its_reason_tells_its_turns():
    view = replace(still(TURNS, 6.0), waiting=False)
    assert judge([view], FAST, Own())[0].reason == "no progress for 6.0 s after 50 turns of its loop, idle; limit 5.0 s"


def test_an_alarm_whose_step_is_not_known_is_settled_when_the_next_attempt_has_run_for_longer():
    place = "a.py:1 in f"
    hung = FAST.hung(None, place, UNDECLARED_S, running_s=1000.0)
    assert hung.raised(0, place) == 3 * UNDECLARED_S
    assert hung.raised(0, "b.py:2 in g") == 0.0, "a step that nobody counts says nothing"
    assert hung.passed(0, 1000.0 + 3 * UNDECLARED_S) == hung
    assert hung.passed(0, 1001.0 + 3 * UNDECLARED_S).raised(0, place) == 0.0


def test_who_has_worked_for_minutes_may_wait_for_a_moment():
    """The share of a core since its mark counts for its silence, that since its last sign for its stillness."""
    waits = replace(STEP, silent_s=200.0, still_s=2.0, cpu_share=0.0, silent_share=0.99)
    assert limit_of(waits, FAST, Own()) == Limit(2.0, IDLE_FLOOR_S)
    assert limit_of(replace(waits, silent_share=0.0), FAST, Own()) == Limit(200.0, POLL_S)


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
    assert actions([still(v, 11.0) for v in busy]) == [(1, "interrupt")]
    late = [replace(v, waiting=v.rank == 0) for v in world(5.2, 4.9)]
    assert actions(late) == []
    assert actions([still(v, v.silent_s + 0.2) for v in late]) == [(1, "interrupt")]
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
    assert actions([still(v, 11.0) for v in views]) == [(0, "interrupt")]


@pytest.mark.parametrize("phase", ["paused", "declared", "first"])
def test_one_exempt_rank_excuses_the_world(phase):
    """Rank 0 evaluates alone for a minute, the others wait in a barrier (H1)."""
    views = [
        replace(still(STEP, 55.0), rank=0, phase=phase, waiting=False),
        *[replace(v, waiting=True) for v in world(55.0, 55.0)[1:]],
    ]
    assert actions(views) == []


def test_a_declared_phase_that_outstays_its_limit_is_the_culprit():
    views = [replace(still(STEP, 6.5), rank=0, phase="declared", limit_s=6.0, waiting=False)]
    views.append(replace(still(STEP, 6.5), rank=1, waiting=True))
    assert actions(views) == [(0, "interrupt")]
    inside = [still(v, 5.5) for v in views]
    assert actions(inside) == []  # asked already, and inside its limit


def test_the_hard_limit_kills_without_asking_but_not_the_victims():
    views = [replace(v, waiting=v.rank == 0) for v in world(9.0, 9.0)]
    assert actions(views, own=Own(soft_s=4.0, hard_s=8.0)) == [(1, "kill")]


def test_a_reason_is_a_sentence_with_its_numbers():
    verdict = judge([replace(still(STEP, 6.0), waiting=False)], FAST, Own())[0]
    assert verdict == Verdict(0, "interrupt", "no progress for 6.0 s after step 50, idle; limit 5.0 s")


def test_who_burns_cpu_may_wait_for_a_device_and_is_not_judged_while_another_moves():
    """Rank 0 evaluates in Python; rank 1 stands in `loss.item()` and spins until rank 0 joins in (H1)."""
    evaluates = replace(STEP, silent_s=40.0, still_s=0.1, cpu_share=1.0)
    spins = replace(still(STEP, 40.0), rank=1, cpu_share=1.0, waiting=False)
    synchronizes = replace(still(STEP, 40.0), rank=2, cpu_share=0.0, waiting=False, kind="device")
    assert actions([evaluates, spins, synchronizes]) == []
    assert actions([replace(evaluates, step=51), spins]) == [(1, "interrupt")], "it is further: nobody waits for it"
    assert actions([replace(evaluates, still_s=9.0, waiting=True), spins]) == [(1, "interrupt")]
    assert actions([evaluates, replace(spins, cpu_share=0.0)]) == [(1, "interrupt")], "idle in no device: a hang"


def test_ddp_s_backward_may_wait_for_a_rank_that_evaluates_or_saves_and_not_for_one_that_hangs():
    """DDP waits in C++ under autograd's own frame: it looks like a rank that hangs in its backward, and is none."""
    waits = replace(still(STEP, 40.0), waiting=False, kind="backward")
    evaluates = replace(STEP, rank=1, silent_s=40.0, still_s=0.1, cpu_share=1.0)
    saves = replace(still(STEP, 40.0), rank=1, waiting=False, kind="save")
    hangs = replace(still(STEP, 40.0), rank=1, waiting=False)
    assert actions([waits, evaluates]) == []
    assert actions([waits, saves]) == []
    assert actions([replace(waits, kind="", cpu_share=1.0), saves]) == [], "or spins in `loss.item()`"
    assert actions([waits, hangs]) == [(1, "interrupt")], "named is who stands where nobody waits for others"
    assert actions([waits, replace(waits, rank=1, waiting=True)]) == [(0, "interrupt")]
    assert actions([waits, replace(waits, rank=1)]) == [(0, "interrupt")], "all wait: somebody has to be called back"


def test_a_still_rank_is_asked_early_whatever_its_limit_is():
    """What its silence was about is learned only from who was asked before it ended."""
    assert actions([replace(still(STEP, 3.0), phase="first")]) == [(0, "probe")]
    hung = FAST.hung(50, "", 60.0)
    assert actions([still(STEP, 3.0)], hung) == [(0, "probe")]
    assert actions([replace(still(STEP, 3.0), phase="paused")]) == []


STACK = """  File "/home/u/everstep/train.py", line 88, in <module>
    train()
  File "/opt/venv/lib/python3.11/site-packages/everstep/training/wrapped.py", line 70, in wrapped
    return caller.call(body)
  File "/home/u/everstep/train.py", line 42, in evaluate
    subprocess.run(["sleep", "40"])
  File "/usr/lib/python3.11/subprocess.py", line 550, in run
    stdout, stderr = process.communicate(input, timeout=timeout)
"""


def test_a_place_is_the_innermost_line_of_the_user_s_own():
    assert place_of(STACK) == "/home/u/everstep/train.py:42 in evaluate"
    assert place_of("") == place_of('  File "<frozen runpy>", line 88, in _run_code\n') == ""


@pytest.mark.parametrize(
    ("file", "function", "kind"),
    [
        ("/v/lib/python3.12/site-packages/torch/serialization.py", "save", "save"),
        ("/v/lib/python3.12/site-packages/torch/distributed/checkpoint/state_dict_saver.py", "save", "save"),
        ("/v/lib/python3.12/site-packages/torch/_dynamo/convert_frame.py", "_compile", "compile"),
        (
            "/v/lib/python3.12/site-packages/torch/_dynamo/eval_frame.py",
            "compile_wrapper",
            "",
        ),  # running, not compiling
        ("/v/lib/python3.12/site-packages/torch/utils/data/dataloader.py", "_try_get_data", "batch"),
        ("/v/lib/python3.12/site-packages/everstep/training/loop.py", "_fetch", "batch"),
        ("/v/lib/python3.12/site-packages/everstep/training/loop.py", "_one", ""),
        ("/v/lib/python3.12/site-packages/torch/cuda/__init__.py", "synchronize", "device"),
        ("/v/lib/python3.12/site-packages/torch/autograd/graph.py", "_engine_run_backward", "backward"),
        ("/home/u/serialization.py", "save", ""),
    ],
)
def test_what_a_stack_is_in_the_middle_of(file, function, kind):
    inside = STACK + f'  File "{file}", line 3, in {function}\n    x()\n'
    assert kind_of(inside) == kind
    hook = inside + '  File "/home/u/everstep/train.py", line 5, in hook\n    lock.acquire()\n'
    assert kind_of(hook) == ("" if kind in ("device", "backward") else kind), "a hook of the user's is inside it"
