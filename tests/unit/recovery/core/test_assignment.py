"""From facts to ranks, and whether to go on: decisions with their reasons."""

import pytest

from everstep.recovery.core import assignment, policy
from everstep.recovery.core.assignment import Standby
from everstep.recovery.core.words import Facts, Fault, Incarnation, Policy, Roster


def standby(number, node="a", slot=None, generation=0):
    facts = Facts(node, number if slot is None else slot, fresh=True)
    return {Incarnation(node, number, 0): Standby(facts, generation)}


def start(**nodes):
    """A roster of generation 0 with so many ranks on each node."""
    standbys = {}
    for node, count in nodes.items():
        for slot in range(count):
            standbys |= standby(slot, node)
    return assignment.first(0, sum(nodes.values()), standbys)


def survivors(roster, *ranks):
    return {m.incarnation: Facts(m.node, m.slot, False, m.rank) for m in roster.members if m.rank in ranks}


def holders(roster):
    return [(m.node, m.slot, m.why) for m in roster.members]


def test_first_numbers_node_by_node_and_keeps_the_highest_slots_as_spares():
    standbys = standby(0, "b") | standby(1, "b") | standby(2, "b") | standby(0, "a") | standby(1, "a") | standby(2, "a")
    roster = assignment.first(3, 4, standbys)
    assert [(m.rank, m.node, m.slot) for m in roster.members] == [(0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1)]
    assert roster.standby == (Incarnation("a", 2, 0), Incarnation("b", 2, 0))
    assert (roster.epoch, roster.generation, roster.reason) == (3, 0, "generation 0 starts with ranks 0-3")


def test_survivors_keep_their_ranks_and_the_same_node_comes_first():
    old = start(a=2, b=2)
    spares = standby(7, "b") | standby(8, "a", slot=9)
    new = assignment.following(old, survivors(old, 1, 2, 3), spares)
    assert holders(new) == [("a", 9, "spare"), ("a", 1, "kept"), ("b", 0, "kept"), ("b", 1, "kept")]
    assert new.standby == (Incarnation("b", 7, 0),)
    assert new.reason == "generation 1: ranks 1-3 kept; rank 0 to slot 9 on the same node (spare)"


def test_another_node_only_takes_what_its_own_does_not_need():
    old = start(a=2, b=1)
    spares = standby(5, "b", slot=1) | standby(6, "a", slot=8) | standby(7, "b", slot=2)
    new = assignment.following(old, survivors(old), spares)
    assert holders(new) == [("a", 8, "spare"), ("b", 2, "spare"), ("b", 1, "spare")]
    assert "rank 1 to slot 2 on node b, no standby was left on a (spare)" in new.reason


def test_who_was_announced_while_gathering_was_started_for_it():
    old = start(a=1)
    new = assignment.following(old, {}, standby(5, generation=1))
    assert new.members[0].why == "started"
    assert new.members[0].fresh


def test_the_end_is_a_roster_without_members():
    end = assignment.final(start(a=2), "")
    assert (end.generation, end.members, end.world_size) == (1, (), 0)


def test_a_roster_goes_over_the_wire_and_back():
    roster = start(a=2, b=1)
    assert Roster.from_json(roster.to_json()) == roster
    end = assignment.final(roster, "a checkpoint is missing")
    assert Roster.from_json(end.to_json()) == end


def faults(*steps, kind="exception"):
    return [Fault(number, kind, "worker", step=step) for number, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("steps", "go_on", "reason"),
    [
        ((None,), True, "progress since the last fault"),
        ((0,), True, "progress"),
        ((5, 6, 7, 8), True, "progress"),
        ((5, 5), True, "2 faults in a row"),
        ((5, 5, 5), False, "3 faults in a row without a new step"),
        ((5, 4, 5), False, "3 faults in a row"),
        ((5, 5, 6, 6), True, "2 faults in a row"),
        ((None, None, None), False, "3 faults in a row"),
        ((5, None, None), False, "3 faults in a row"),
    ],
)
def test_progress_is_what_counts(steps, go_on, reason):
    verdict = policy.decide(Policy(2), len(steps) - 1, faults(*steps))
    assert verdict.go_on is go_on
    assert reason in verdict.reason


@pytest.mark.parametrize(("generation", "go_on"), [(0, True), (1, True), (2, False)])
def test_a_number_given_is_for_the_whole_job(generation, go_on):
    verdict = policy.decide(Policy(2, max_restarts=2), generation, faults(1, 2, 3)[: generation + 1])
    assert verdict.go_on is go_on
    assert "of 2" in verdict.reason or "all 2 restarts" in verdict.reason


def test_a_script_that_fails_before_the_call_is_not_started_again():
    failed = [Fault(0, "script", "pidfd", rank=1, text="ended with status 1")]
    verdict = policy.decide(Policy(2), 0, failed)
    assert not verdict.go_on
    assert verdict.reason.endswith("script of rank 1 (ended with status 1)")
    assert policy.decide(Policy(2, max_restarts=1), 0, failed).go_on, "a number is a number, as torchrun means it"
