"""Faults at every moment: a second, a third, and two at once, in each phase of a restart, on each rank.

Every cell is a run of the real tables in which harm is done as soon as the rank stands where the cell says. Which cells
cannot be reached is said, and nothing else may be left undone. How it ends is judged for each.
"""

from itertools import cycle, product

import pytest

from everstep.recovery.core.words import Policy
from everstep.testing.world import STRIKES, Moment, Setting, SimulatedWorld, Strike
from everstep.testing.world.moments import RESTART

RANKS = range(3)
ENDLESS = Policy(3, same_step_limit=1000, patience=1000, start_deadline_s=1e9, drain_deadline_s=1e9)
FATAL_AT_SHUTDOWN = ("raise", "kill", "hang", "stop")
TRIES = 40
FIRST = tuple(product(("raise", "kill"), RANKS))


def run(strikes, policy=ENDLESS, layouts=(1, 2), tries=TRIES):
    """Run until the order of events is one in which every strike finds its moment; None where there is none."""
    for seed, nodes in zip(range(tries), cycle(layouts), strict=False):
        setting = Setting(seed, 3, nodes, spares=1, steps=2, harms=0, policy=policy, hale=True)
        world = SimulatedWorld(setting, strikes)
        ends = list(world.run())
        if not world.adversary.strikes:
            return world, ends
    return None


def reachable(first, moment, rank):
    """A process that raised is not told to leave; one that was killed leaves nothing behind, its successor begins."""
    kind, injured = first
    if rank == injured:
        gone = {Moment.ABORT, Moment.UNWIND}
        gone |= {Moment.FINALIZE, Moment.HEALTH_CHECK, Moment.ROSTER} if kind == "kill" else {Moment.SCRIPT}
        return moment not in gone
    return moment is not Moment.SCRIPT


def check(done, strikes):
    """A signal ends the job with its code; a bad end after the end was decided is told; all else is survived."""
    world, ends = done
    harms = [s.harm for s in strikes]
    for end in ends:
        if "end" in harms and end.code == 143:
            continue
        late = "after all had completed" in end.reason and strikes[-1].moment is not Moment.STEP
        assert end.code == 0 or (end.code == 1 and late), (strikes, end)
    if strikes[-1].moment is Moment.SHUTDOWN and not {"end", "cut"} & set(harms):  # it may end before it reads
        fatal = strikes[-1].harm in FATAL_AT_SHUTDOWN
        earlier = any(s.moment is Moment.COMPLETION and s.harm in FATAL_AT_SHUTDOWN for s in strikes)
        assert {end.code for end in ends} <= ({0, 1} if earlier and not fatal else {int(fatal)}), strikes
    generations = sum(bool(roster.members) for roster in world.board.values())
    assert generations <= 1 + 2 * len(strikes), "each fault costs a generation; one that was known too late, two"


@pytest.mark.parametrize("moment", [*RESTART, Moment.SCRIPT])
def test_a_second_fault(moment):
    for first, rank, harm in product(FIRST, RANKS, STRIKES):
        strikes = [Strike(Moment.STEP, first[1], first[0]), Strike(moment, rank, harm)]
        if reachable(first, moment, rank):
            done = run(strikes)
            assert done is not None, f"never done: {strikes}"
            check(done, strikes)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
@pytest.mark.parametrize("moment", [m for m in RESTART if m is not Moment.SHUTDOWN])
def test_a_third_fault(moment, part):
    """After a second of each kind that leaves the process, and one that does not; the harms take turns.

    A third of all in the default tier: of each of the moments that follow, each rank, and each pair of ranks.
    """
    harms = cycle(product(("raise", "kill", "stop"), STRIKES))
    missed = 0
    for rank, (at, then), other in product(RANKS, enumerate(RESTART), RANKS):
        second, third = next(harms)
        if (rank + at + other) % 3 != part:
            continue
        strikes = [
            Strike(Moment.STEP, (rank + 1) % 3, "raise"),
            Strike(moment, rank, second),
            Strike(then, other, third),
        ]
        done = run(strikes)
        if done is None:
            missed += 1
            assert then in (Moment.ABORT, Moment.UNWIND, Moment.FINALIZE, Moment.HEALTH_CHECK, Moment.ROSTER), strikes
        else:
            check(done, strikes)
    assert missed < 12, "of 30"


@pytest.mark.parametrize("moment", RESTART)
def test_two_faults_at_once(moment):
    """One where the moment is, one wherever another rank stands then."""
    for (kind, injured), harm, other in product(FIRST[::4], ("raise", "kill", "hang", "stop"), STRIKES):
        rank, victim = (injured + 1) % 3, (injured + 2) % 3
        strikes = [
            Strike(Moment.STEP, injured, kind),
            Strike(moment, rank, harm),
            Strike(moment, rank, other, victim=victim, at_once=True),
        ]
        done = run(strikes)
        assert done is not None, f"never done: {strikes}"
        if moment is not Moment.SHUTDOWN:
            check(done, strikes)


@pytest.mark.parametrize("moment", [Moment.COMPLETION, Moment.FINALIZE, Moment.ROSTER, Moment.INITIALIZE])
def test_a_fault_elsewhere_while_a_rank_is_ahead(moment):
    """A peer has completed, or is back already, when another rank is harmed."""
    for harm, rank, victim in product(STRIKES, RANKS, RANKS):
        strikes = [Strike(Moment.STEP, 0, "raise"), Strike(moment, rank, harm, victim=victim)]
        done = run(strikes)
        assert done is not None, f"never done: {strikes}"
        check(done, strikes)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("moment", [m for m in RESTART if m is not Moment.SHUTDOWN])
@pytest.mark.parametrize("rank", RANKS)
def test_every_second_with_every_third(moment, rank):
    for second, then, other, third in product(STRIKES, RESTART, RANKS, STRIKES):
        strikes = [
            Strike(Moment.STEP, (rank + 1) % 3, "raise"),
            Strike(moment, rank, second),
            Strike(then, other, third),
        ]
        if second != "end" and (done := run(strikes, tries=6)) is not None:  # else: it cannot come, or hardly ever
            check(done, strikes)


# When it is enough.


def patient(strikes, **policy):
    return run(strikes, Policy(3, start_deadline_s=1e9, drain_deadline_s=1e9, **policy), layouts=(1,))


@pytest.mark.parametrize("moment", [Moment.INITIALIZE, Moment.FIRST_COLLECTIVE])
def test_an_endless_fault_ends_with_the_story_of_its_attempts(moment):
    done = patient([Strike(moment, 1, "raise")] * 3)
    (end,) = done[1]
    assert end.code == 1
    told = "exception of rank 1 after step 0, in generations 0-2"
    assert end.reason == f"3 faults in a row without a new step in between, the last: {told}"


def test_faults_that_differ_are_more_patiently_borne_and_told_one_by_one():
    kinds = [(0, "raise"), (1, "kill"), (2, "raise"), (1, "raise"), (2, "kill"), (0, "kill")] * 2
    strikes = [Strike(Moment.FIRST_COLLECTIVE, *kind, generation=g) for g, kind in enumerate(kinds)]
    assert patient(strikes[:9])[1][0].code == 0
    (end,) = patient(strikes[:10])[1]
    assert (end.code, end.reason.count("\n")) == (1, 10)
    assert end.reason.startswith("10 faults in a row without a new step in between, the last: exception of rank 1")
    assert "\n  generation 1: death of rank 1 after step 0 (ended by signal 9)\n" in end.reason


def test_deaths_before_the_generation_is_entered_are_not_attempts_of_a_step():
    strikes = [Strike(Moment.STEP, 0, "raise"), *[Strike(Moment.ASSIGNMENT, 1, "kill")] * 5]
    world, ends = patient(strikes)
    assert [end.code for end in ends] == [0]
    assert sum(bool(roster.members) for roster in world.board.values()) == 7


@pytest.mark.parametrize("moment", [m for m in RESTART if m is not Moment.SHUTDOWN])
def test_the_budget_counts_every_fault(moment):
    strikes = [Strike(Moment.STEP, 0, "raise"), Strike(moment, 1, "kill")]
    world, ends = patient(strikes, max_restarts=1)
    used = sum(bool(roster.members) for roster in world.board.values()) - 1
    assert used <= 1
    for end in ends:
        assert end.code == 0 or "all 1 restarts that --max-restarts allows are used" in end.reason
