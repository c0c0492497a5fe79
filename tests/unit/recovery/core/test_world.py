"""The world's table, step by step on one agent: the paths that the docs draw, and what is refused."""

from dataclasses import replace

import pytest

from everstep.errors import ProtocolError
from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Completed,
    Died,
    Drain,
    Drained,
    End,
    EndRequested,
    Enter,
    Event,
    Facts,
    Fault,
    Faulted,
    Finish,
    Incarnation,
    Kill,
    Policy,
    Publish,
    Published,
    Report,
    Roster,
    Spawn,
    Stop,
    Ticked,
    Wedged,
)
from everstep.recovery.core.world import TRANSITIONS, Phase, Settled, World, begin, step, wake_at


def proc(number):
    return Incarnation("boot", number, 0)


def facts(number, *, fresh=True, dirt=(), node="a"):
    return Facts(node, number, fresh, None, dirt)


class Agent:
    """A world, its clock, and a driver that answers `Publish` at once with what was proposed."""

    def __init__(self, size=2, spares=0, **policy):
        self.now = 0.0
        self.world = begin("a", Policy(size, **policy))
        self.orders = []
        self.say(Ticked())
        for number in range(size + spares):
            self.say(Announced(proc(number), facts(number)))

    def say(self, *events):
        """Step; return the commands of these events."""
        start = len(self.orders)
        queue = list(events)
        while queue:
            self.world, commands = step(self.world, queue.pop(0), self.now)
            self.orders += commands
            queue += [Published(c.roster) for c in commands if isinstance(c, Publish)]
        return self.orders[start:]

    def arrive(self, *numbers, **more):
        generation = self.world.generation
        return self.say(*(Arrived(generation, proc(n), facts(n, fresh=False, **more)) for n in numbers))

    def raise_in(self, number, step=None, **more):
        rank = self.world.ranks[proc(number)]
        return self.say(Faulted(Fault(self.world.generation, "exception", "worker", proc(number), rank, step, **more)))

    def complete(self, *numbers):
        return self.say(*(Completed(self.world.generation, proc(n)) for n in numbers))

    @property
    def holders(self):
        return [m.incarnation.pid for m in self.world.members]


def kinds(commands):
    return [type(c).__name__ for c in commands]


def test_every_phase_has_a_row_and_every_event_a_place():
    assert set(TRANSITIONS) == set(Phase)
    for phase, row in TRANSITIONS.items():
        assert set(row) - {Settled} <= set(Event.__args__), phase
    assert set().union(*TRANSITIONS.values()) == {*Event.__args__, Settled}


def test_a_job_without_a_fault():
    agent = Agent(2)
    assert kinds(agent.orders) == ["Spawn", "Publish", "Enter"]
    assert agent.orders[0] == Spawn(2)
    assert agent.world.phase is Phase.RUNNING
    assert [(m.rank, m.incarnation.pid, m.why) for m in agent.world.members] == [(0, 0, "started"), (1, 1, "started")]
    assert agent.complete(0) == []
    assert agent.complete(1) == [Drain(0)]
    ends = agent.say(Drained(0))
    assert kinds(ends) == ["Publish", "Finish"]
    assert ends[0].roster.members == ()
    assert ends[1] == Finish(0)
    assert agent.say(Died(proc(0), 0)) == []
    assert agent.say(Died(proc(1), 0)) == [End(0, "all members have completed")]


def test_an_exception_keeps_every_process():
    agent = Agent(2)
    orders = agent.raise_in(0, step=7)
    assert kinds(orders) == ["Report", "Stop", "Stop"]
    assert [o.generation for o in orders[1:]] == [0, 0]
    assert agent.arrive(1) == []
    assert kinds(agent.arrive(0)) == ["Publish", "Enter"]
    assert (agent.holders, agent.world.generation) == ([0, 1], 1)
    assert agent.world.roster.reason == "generation 1: ranks 0-1 kept"


def test_a_killed_rank_goes_to_the_spare():
    agent = Agent(3, spares=1)
    orders = agent.say(Died(proc(1), -9, step=4))
    assert orders == [
        Report(Fault(0, "death", "agent a", proc(1), 1, 4, "ended by signal 9")),
        Stop(proc(0), 0),
        Stop(proc(2), 0),
    ]
    assert kinds(agent.arrive(0, 2)) == ["Publish", "Enter"]
    assert agent.holders == [0, 3, 2]
    assert agent.world.members[1].why == "spare"
    assert agent.world.roster.reason == "generation 1: ranks 0,2 kept; rank 1 to slot 3 on the same node (spare)"


def test_without_a_spare_one_is_asked_for_once():
    agent = Agent(2)
    assert Spawn(1) in agent.say(Died(proc(1), -9))
    assert agent.arrive(0) == []
    assert kinds(agent.say(Announced(proc(5), facts(5)))) == ["Publish", "Enter"]
    assert agent.world.members[1].why == "started"


def test_a_death_overrides_an_arrival():
    agent = Agent(3, spares=1)
    agent.raise_in(2)
    agent.arrive(0)
    agent.say(Died(proc(0), -11))
    agent.arrive(1, 2)
    assert agent.holders == [3, 1, 2]


def test_a_member_that_died_before_the_roster_was_entered_faults_it_at_once():
    agent = Agent(2, spares=1)
    agent.raise_in(0)
    agent.world, _ = step(agent.world, Arrived(1, proc(0), facts(0, fresh=False)), 0.0)
    agent.world, (publish,) = step(agent.world, Arrived(1, proc(1), facts(1, fresh=False)), 0.0)
    agent.world, nothing = step(agent.world, Died(proc(1), -9), 0.0)
    assert nothing == ()
    agent.world, orders = step(agent.world, Published(publish.roster), 0.0)
    assert kinds(orders) == ["Enter", "Report", "Stop"]
    assert (orders[2], agent.world.generation) == (Stop(proc(0), 1), 2)


def test_who_does_not_leave_is_killed_and_its_rank_waits_for_its_death():
    agent = Agent(2, spares=1, stop_deadline_s=5)
    agent.raise_in(0)
    agent.arrive(0)
    assert wake_at(agent.world) == 5
    agent.now = 5
    (kill,) = agent.say(Ticked())
    assert kill == Kill(proc(1), "it has not left generation 0 within 5 s")
    assert agent.say(Ticked()) == []
    assert agent.arrive(1) == [], "an arrival does not save it: the order is on its way"
    assert kinds(agent.say(Died(proc(1), -9))) == ["Publish", "Enter"]
    assert agent.holders == [0, 2]


def test_a_dirty_survivor_is_replaced():
    agent = Agent(2, spares=1)
    agent.raise_in(0)
    agent.arrive(0)
    (kill,) = agent.arrive(1, dirt=("autocast",))
    assert kill == Kill(proc(1), "it differs from a fresh process (rank 1: autocast)")
    agent.say(Died(proc(1), -9))
    assert agent.holders == [0, 2]


def test_a_wedged_member_is_killed_and_the_others_stopped():
    agent = Agent(2, spares=1)
    orders = agent.say(Wedged(proc(1), "stopped by a signal", step=3))
    assert orders == [
        Kill(proc(1), "it cannot hear its agent: stopped by a signal"),
        Report(Fault(0, "wedged", "agent a", proc(1), 1, 3, "stopped by a signal")),
        Stop(proc(0), 0),
    ]
    assert agent.say(Wedged(proc(1))) == []
    agent.arrive(0)
    agent.say(Died(proc(1), -9))
    assert agent.holders == [0, 2]


def test_a_wedged_spare_is_killed_without_a_fault():
    agent = Agent(2, spares=1)
    assert kinds(agent.say(Wedged(proc(2)))) == ["Kill"]
    assert agent.world.phase is Phase.RUNNING
    assert agent.say(Died(proc(2), -9, "fresh")) == []
    assert len(agent.world.false_starts) == 1


@pytest.mark.parametrize(
    ("event", "kind"), [(Died(proc(1), -9), "death"), (Died(proc(1), 0), "left"), (Wedged(proc(1)), "wedged")]
)
def test_a_death_explains_the_lost_connection_that_was_reported_first(event, kind):
    agent = Agent(2, spares=1)
    agent.raise_in(0, step=6, victim=True)
    better = agent.say(event)[0]
    assert better == Report(replace(better.fault, kind=kind, incarnation=proc(1), rank=1, step=6))
    assert agent.world.causes == (better.fault,)


def test_those_that_a_stop_ends_explain_nothing():
    """A script that does not know us: its processes are killed for the exception of one, which stays the cause."""
    agent = Agent(3, deaf=True)
    assert kinds(agent.raise_in(1)) == ["Report", "Stop", "Stop", "Stop"]
    orders = agent.say(*(Died(proc(n), -9) for n in range(3)))
    assert "Report" not in kinds(orders)
    assert agent.world.causes[-1].kind == "exception"
    assert kinds(orders) == ["Spawn", "Spawn", "Spawn"]


def test_one_that_was_dying_before_a_stop_ended_the_others_is_the_cause():
    """Its peer has told of the broken connection before its own agent could reap it."""
    agent = Agent(3, deaf=True)
    agent.raise_in(0, victim=True)
    agent.say(Died(proc(2), -9))
    (report,) = (o.fault for o in agent.say(Died(proc(1), -9, unasked=True)) if isinstance(o, Report))
    assert (report.kind, report.rank, report.incarnation) == ("death", 1, proc(1))
    assert agent.world.causes == (report,)
    assert "Report" not in kinds(agent.say(Died(proc(0), 1, unasked=True)))


@pytest.mark.parametrize(
    ("death", "attempted"),
    [(Died(proc(1), -9), True), (Died(proc(1), -9, generation=1), True), (Died(proc(1), -9, generation=0), False),
     (Died(proc(1), -9, "fresh"), False)],
)  # fmt: skip
def test_a_death_before_the_entry_was_nobody_s_attempt(death, attempted):
    agent = Agent(2, spares=2)
    agent.raise_in(0, step=3)
    agent.arrive(0, 1)
    (report,) = (order.fault for order in agent.say(death) if isinstance(order, Report))
    assert (report.generation, report.kind, report.attempted) == (1, "death", attempted)


@pytest.mark.parametrize("event", [Died(proc(1), -9), Died(proc(1), 0), Wedged(proc(1))])
def test_a_second_fault_is_not_the_cause_of_an_exception_that_says_more(event):
    agent = Agent(2, spares=2)
    agent.raise_in(0, step=6, text="ValueError: the batch is bad")
    assert "Report" not in kinds(agent.say(event))
    assert [fault.text for fault in agent.world.causes] == ["ValueError: the batch is bad"]


@pytest.mark.parametrize("first", ["the exception", "the death"])
def test_a_death_that_is_known_comes_before_what_a_victim_says(first):
    """Both come before the generation is entered here, in whatever order."""
    agent = Agent(2, spares=1)
    agent.raise_in(1)
    news = [Faulted(Fault(1, "exception", "worker", proc(0), 0, victim=True)), Died(proc(1), -9, "running", 3, 1)]
    for event in news if first == "the exception" else reversed(news):
        agent.world, _ = step(agent.world, event, 0.0)
    agent.world, (publish,) = step(agent.world, Arrived(1, proc(0), facts(0, fresh=False)), 0.0)
    was = Roster(0, 1, (publish.roster.members[0], agent.world.members[1]))
    agent.world, orders = step(agent.world, Published(was), 0.0)
    assert [o.fault.kind for o in orders if isinstance(o, Report)] == ["death"]


def test_what_a_victim_says_counts_where_nothing_else_is_known():
    agent = Agent(2)
    (report, *_) = agent.raise_in(0, victim=True)
    assert (report.fault.kind, report.fault.rank) == ("exception", 0)


def test_a_death_that_explains_nothing_is_not_reported():
    agent = Agent(3, spares=3, stop_deadline_s=1)
    agent.raise_in(0, victim=True)
    assert agent.say(Died(proc(0), -9)) == [], "the one that raised"
    agent.arrive(1)
    assert agent.say(Died(proc(1), -9)) == [], "it had come back: another fault"
    agent.now = 1
    agent.say(Ticked())
    assert kinds(agent.say(Died(proc(2), -9))) == ["Publish", "Enter"], "our own order"


def test_a_fault_while_others_have_completed_sends_all_back():
    agent = Agent(2)
    agent.complete(0)
    assert kinds(agent.raise_in(1)) == ["Report", "Stop", "Stop"]
    agent.arrive(0, 1)
    assert agent.world.phase is Phase.RUNNING
    assert agent.complete(1) == [], "what was completed in generation 0 counts no more"


def test_a_fault_while_draining_sends_all_back():
    agent = Agent(2, spares=1)
    agent.complete(0, 1)
    assert kinds(agent.say(Died(proc(1), -9))) == ["Report", "Stop"]
    assert agent.say(Drained(0)) == [], "the answer to an order that is void"


def test_scripts_without_the_wrapper_end_one_by_one():
    agent = Agent(2)
    agent.complete(0)
    assert agent.say(Died(proc(0), 0, "completed")) == []
    agent.complete(1)
    assert agent.world.phase is Phase.DRAINING
    agent.say(Died(proc(1), 0, "completed"))
    assert agent.say(Drained())[-1] == End(0, "all members have completed")


def test_one_that_has_ended_well_is_replaced_when_the_others_must_go_back():
    agent = Agent(2, spares=1)
    agent.complete(0)
    agent.say(Died(proc(0), 0, "completed"))
    agent.say(Died(proc(1), -9))
    assert agent.world.phase is Phase.GATHERING
    agent.say(Announced(proc(7), facts(7)))
    assert agent.holders == [2, 7]


def test_leaving_before_completion_is_a_fault():
    agent = Agent(2)
    assert agent.say(Died(proc(1), 0))[0].fault.kind == "left"


def test_a_bad_exit_after_the_end_is_no_restart():
    agent = Agent(2)
    agent.complete(0, 1)
    agent.say(Drained(0))
    assert agent.say(Died(proc(1), 3)) == [], "rank 0 may be writing its results"
    (end,) = agent.say(Died(proc(0), 0))
    assert (end.code, end.reason.partition(":")[0]) == (1, "rank 1 ended with status 3 after all had completed")


def test_others_that_do_not_end_are_not_waited_for_for_ever():
    """Rank 0 may wait for rank 1 in a kernel of NCCL, which burns CPU and never ends."""
    agent = Agent(2, finish_deadline_s=1800)
    agent.complete(0, 1)
    agent.say(Drained(0))
    assert wake_at(agent.world) is None
    agent.now = 5
    agent.say(Died(proc(1), -9))
    assert wake_at(agent.world) == 1805
    agent.now = 1805
    (end,) = agent.say(Ticked())
    assert end.code == 1
    assert end.reason.endswith("; rank 0 had not ended 1800 s later")


def test_every_bad_exit_after_the_end_is_told():
    agent = Agent(3)
    agent.complete(0, 1, 2)
    agent.say(Drained(0), Died(proc(2), -9), Died(proc(0), 0))
    (end,) = agent.say(Died(proc(1), 1))
    assert end.reason.startswith("rank 1 ended with status 1 and rank 2 ended with status -9 after all had completed: ")


def test_checkpoints_that_do_not_come_are_given_up_by_name():
    agent = Agent(1, drain_deadline_s=9)
    agent.now = 100
    agent.complete(0)
    assert wake_at(agent.world) == 109
    agent.now = 109
    assert kinds(agent.say(Ticked())) == ["Publish", "Finish"]
    assert agent.say(Died(proc(0), 0)) == [End(1, "the last checkpoints were not durable within 9 s")]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_max_restarts_is_for_the_whole_job(allowed):
    agent = Agent(1, max_restarts=allowed)
    for number in range(allowed):
        assert kinds(agent.raise_in(0, step=100 * number)) == ["Report", "Stop"]
        agent.arrive(0)
    report, end = agent.raise_in(0, step=1000)
    assert isinstance(report, Report)
    assert (end.code, agent.world.phase) == (1, Phase.ENDED)
    assert f"all {allowed} restarts" in end.reason


def test_three_faults_at_the_same_step_end_the_job():
    agent = Agent(1)
    for at in (4, 5, 5):
        agent.raise_in(0, step=at)
        agent.arrive(0)
    assert kinds(agent.raise_in(0, step=5)) == ["Report", "End"]


def test_fresh_processes_that_fail_three_times_end_the_job():
    agent = Agent(1)
    agent.say(Died(proc(0), -9))
    assert agent.say(Died(proc(1), 7, "fresh")) == [Spawn(1)]
    assert agent.say(Died(proc(2), 7, "fresh")) == [Spawn(1)]
    (end,) = agent.say(Died(proc(3), 7, "fresh"))
    assert end == End(1, "3 fresh processes in a row ended before they had a rank, the last with status 7")


def test_a_running_world_does_not_end_for_its_spares():
    agent = Agent(1)
    for number in (1, 2, 3):
        assert agent.say(Died(proc(number), 1, "fresh")) == []
    assert len(agent.world.false_starts) == 3


def test_no_process_to_start_with_is_a_failure():
    agent = Agent(1, start_deadline_s=50)
    agent.world, _ = step(begin("a", agent.world.policy), Ticked(), 7.0)
    assert wake_at(agent.world) == 57
    agent.now = 57
    assert agent.say(Ticked()) == [End(1, "generation 0 waited 50 s for fresh processes for 1 of 1 ranks")]


def test_no_process_to_go_on_with_is_the_fault_of_the_node():
    agent = Agent(1, start_deadline_s=50, stop_deadline_s=10)
    agent.now = 7
    agent.say(Died(proc(0), -9))
    assert wake_at(agent.world) == 67
    agent.now = 67
    story = "; before it, death of rank 0 (ended by signal 9)"
    assert agent.say(Ticked()) == [End(75, f"generation 1 waited 60 s for fresh processes for 1 of 1 ranks{story}")]


def test_a_process_that_cannot_be_killed_ends_the_job():
    agent = Agent(2, start_deadline_s=500, stop_deadline_s=10, death_deadline_s=50)
    agent.raise_in(0)
    agent.arrive(0)
    agent.now = 10
    (kill,) = agent.say(Ticked())
    assert isinstance(kill, Kill)
    assert wake_at(agent.world) == 60
    agent.now = 60
    (end,) = agent.say(Ticked())
    assert end == End(75, "generation 1 waited 60 s for the death of rank 1 (boot.1.0); before it, exception of rank 0")


def test_a_store_that_does_not_answer_ends_the_job():
    agent = Agent(1, start_deadline_s=50, stop_deadline_s=10)
    agent.raise_in(0)
    agent.world, _ = step(agent.world, Arrived(1, proc(0), facts(0, fresh=False)), 0.0)
    assert wake_at(agent.world) == 60
    agent.now = 60
    (end,) = agent.say(Ticked())
    lacking = "an answer from the store that holds the rosters"
    assert end == End(75, f"generation 1 waited 60 s for {lacking}; before it, exception of rank 0")


# Where no replacement comes.


def sizes(agent):
    return [(m.rank, m.incarnation.pid) for m in agent.world.members]


def test_a_spare_that_is_there_keeps_the_size_of_a_world_that_may_shrink():
    agent = Agent(3, spares=1, min_world_size=1, replace_deadline_s=0.0)
    agent.say(Died(proc(1), -9))
    agent.arrive(0, 2)
    assert sizes(agent) == [(0, 0), (1, 3), (2, 2)]


def test_without_one_the_world_shrinks_after_the_time_that_was_given():
    agent = Agent(4, min_world_size=2, replace_deadline_s=20.0)
    agent.now = 5
    assert Spawn(1) in agent.say(Died(proc(1), -9))
    agent.arrive(0, 2, 3)
    assert agent.world.phase is Phase.GATHERING
    assert wake_at(agent.world) == 25
    agent.now = 25
    assert kinds(agent.say(Ticked())) == ["Publish", "Enter"]
    assert sizes(agent) == [(0, 0), (1, 2), (2, 3)], "those above the gap move down"
    assert agent.world.roster.reason == "generation 1: 3 ranks go on; rank 1 of the last one is lost"


def test_a_replacement_that_comes_in_time_keeps_its_size():
    agent = Agent(2, min_world_size=1, replace_deadline_s=20.0)
    agent.say(Died(proc(1), -9))
    agent.arrive(0)
    agent.now = 19
    assert agent.say(Ticked()) == []
    assert kinds(agent.say(Announced(proc(7), facts(7)))) == ["Publish", "Enter"]
    assert sizes(agent) == [(0, 0), (1, 7)]


def test_the_time_runs_from_the_last_loss():
    """Killed after 10 s for it did not leave; the spare that was to take its rank is lost at 18 s."""
    agent = Agent(2, spares=1, min_world_size=1, replace_deadline_s=15.0)
    agent.raise_in(0)
    agent.arrive(0)
    agent.now = 10
    assert kinds(agent.say(Ticked())) == ["Kill"]
    agent.say(Died(proc(2), -9, "fresh"))
    agent.now = 18
    agent.say(Died(proc(1), -9))
    assert (agent.world.phase, wake_at(agent.world)) == (Phase.GATHERING, 33)


def test_nobody_is_awaited_where_fresh_processes_fail():
    agent = Agent(3, min_world_size=2, replace_deadline_s=600.0)
    agent.say(Died(proc(1), -9))
    agent.arrive(0, 2)
    for number in (3, 4):
        assert agent.say(Died(proc(number), 7, "fresh")) == [Spawn(1)]
    assert kinds(agent.say(Died(proc(5), 7, "fresh"))) == ["Publish", "Enter"]
    assert sizes(agent) == [(0, 0), (1, 2)]


def test_too_few_are_waited_for_and_then_the_job_ends_with_its_story():
    agent = Agent(3, min_world_size=2, replace_deadline_s=20.0)
    agent.say(Died(proc(1), -9, step=4), Died(proc(2), -9))
    agent.arrive(0)
    assert wake_at(agent.world) == 20
    agent.now = 20
    text = "generation 1 waited 20 s for fresh processes for 2 of 3 ranks and may not go on with fewer than 2"
    story = "; before it, death of rank 1 after step 4 (ended by signal 9)"
    assert agent.say(Ticked()) == [End(75, text + story)]


def test_a_time_without_leave_to_shrink_ends_the_job():
    agent = Agent(2, replace_deadline_s=0.0)
    agent.say(Died(proc(1), -9))
    (end,) = agent.arrive(0)
    assert end.code == 75


def test_a_world_that_has_shrunk_shrinks_on_and_no_further_than_it_may():
    agent = Agent(4, min_world_size=2, replace_deadline_s=0.0, start_deadline_s=50)
    for at in range(2):
        agent.say(Died(proc(agent.holders[0]), -9, step=at + 1))
        agent.arrive(*agent.holders[1:])
    assert sizes(agent) == [(0, 2), (1, 3)]
    agent.say(Died(proc(2), -9, step=9))
    (end,) = agent.arrive(3)
    assert "fresh processes for 1 of 2 ranks and may not go on with fewer than 2" in end.reason


@pytest.mark.parametrize("phase", Phase)
def test_the_end_may_be_asked_for_at_any_time(phase):
    world = replace(Agent(1).world, phase=phase)
    after, orders = step(world, EndRequested(143, "SIGTERM"), 0.0)
    assert after.phase is Phase.ENDED
    assert orders == (() if phase is Phase.ENDED else (End(143, "SIGTERM"),))


def test_late_and_repeated_news_is_void():
    agent = Agent(2, spares=2)
    agent.say(Died(proc(1), -9))
    agent.arrive(0)
    world = agent.world
    for event in [
        Announced(proc(0), facts(0)),
        Announced(proc(1), facts(1)),
        Announced(proc(3), facts(3)),
        Died(proc(1), -15),
        Arrived(0, proc(0), facts(0)),
        Completed(0, proc(0)),
        Faulted(Fault(0, "exception", "worker", proc(0), 0)),
        Wedged(proc(1)),
        Published(Roster(0, 0, ())),
        Drained(0),
    ]:
        assert step(world, event, 1.0) == (world, ()), event


def test_a_report_of_somebody_whom_the_roster_does_not_list_is_void():
    agent = Agent(2, spares=1)
    assert agent.say(Faulted(Fault(0, "exception", "worker", proc(9)))) == []
    assert agent.complete(0, 9) == []
    assert kinds(agent.say(Faulted(Fault(0, "stall", "page")))) == ["Report", "Stop", "Stop"], "the world's own"


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Drained(), "Announced, Arrived"),
        (Announced(proc(9), facts(9, fresh=False)), "a fresh process"),
        (Published(Roster(0, 0, (), (), "another")), "one roster for generation 0"),
        (Published(Roster(1, 1, ())), "one roster for generation 1 of epoch 0"),
    ],
)
def test_what_cannot_follow_is_refused_and_changes_nothing(event, expected):
    world = Agent(2).world
    before = replace(world)
    with pytest.raises(ProtocolError, match=r"see docs/recovery\.md") as caught:
        step(world, event, 0.0)
    assert expected in str(caught.value)
    assert "running in generation 0" in str(caught.value)
    assert world == before


@pytest.mark.parametrize("ranks", [(0,), (1, 0), (0, 0)])
def test_a_malformed_roster_is_refused(ranks):
    world = Agent(2).world
    listed = {m.rank: m for m in world.members}
    roster = Roster(0, 1, tuple(listed[r] for r in ranks))
    with pytest.raises(ProtocolError, match="each of ranks 0-1 once"):
        step(world, Published(roster), 0.0)


def test_a_world_of_nobody_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Policy(0)


def test_world_is_a_value():
    assert isinstance(Agent(1).world, World)
    assert Enter(Agent(1).world.roster) in Agent(1).orders


def test_the_first_roster_of_several_nodes_waits_for_the_share_of_each():
    """A node with spares must not start with more than its share because another is slow."""
    agent = Agent(2, spares=1, local_world_size=2, shares=(("a", 1), ("b", 1)))
    assert agent.world.phase is Phase.GATHERING
    assert agent.world.vacant == 1
    agent.say(Announced(proc(9), facts(1, node="b")))
    assert [(m.node, m.incarnation.pid) for m in agent.world.members] == [("a", 0), ("b", 9)]
