"""From facts to ranks, and whether to go on: decisions with their reasons."""

from dataclasses import replace

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


def spare_node(name, count, first=10):
    return {k: v for n in range(count) for k, v in standby(first + n, name).items()}


def by_node(old, ranks, standbys, *gone, share=2, most=6):
    nodes = assignment.Nodes(frozenset(gone), share, most)
    return assignment.following(old, survivors(old, *ranks), standbys, nodes)


def nodes_of(roster):
    return "".join(m.node for m in roster.members)


@pytest.mark.parametrize(
    ("world", "left", "waits", "gone", "most", "becomes"),
    [
        # a spare node takes the ranks of a lost one, all of them, though another node has a spare of a lower slot
        ({"a": 2, "b": 2}, (0, 1), spare_node("s", 3) | standby(2, "a"), "b", 4, "aass"),
        # the first that has enough, not the first
        ({"a": 2, "b": 2}, (0, 1), spare_node("r", 1) | spare_node("s", 2), "b", 4, "aass"),
        # one of a node that is here is its own node's to replace, never a spare node's
        ({"a": 2, "b": 2}, (0, 1, 2), spare_node("s", 3), "", 4, "aab"),
        ({"a": 2, "b": 2}, (0, 1, 2), spare_node("s", 3) | standby(4, "b"), "", 4, "aabb"),
        # a spare of another node that has ranks helps where no spare node is left
        ({"a": 2, "b": 2}, (0, 1), standby(2, "a") | standby(3, "a"), "b", 4, "aaaa"),
        # two are lost, one node waits: the first of them, and the world shrinks by a node
        ({"a": 2, "b": 2, "c": 2}, (0, 1), spare_node("s", 2), "bc", 6, "aass"),
        # all workers of an unwrapped script are gone, and none comes to stand elsewhere
        ({"a": 2, "b": 2}, (), spare_node("s", 2) | standby(4, "a") | standby(5, "a"), "b", 4, "aass"),
        # a world that may be larger takes whole nodes, in the order of their names
        ({"a": 2}, (0, 1), spare_node("t", 2) | spare_node("s", 3), "", 6, "aasstt"),
        ({"a": 2}, (0, 1), spare_node("t", 2) | spare_node("s", 1), "", 6, "aatt"),
        ({"a": 2}, (0, 1), spare_node("t", 2) | spare_node("s", 3), "", 5, "aass"),
        # it shrinks and grows in one
        ({"a": 2, "b": 2}, (0, 1, 2), spare_node("s", 2), "", 6, "aabss"),
    ],
)
def test_ranks_are_given_by_whole_nodes(world, left, waits, gone, most, becomes):
    new = by_node(start(**world), left, waits, *gone, most=most)
    assert nodes_of(new) == becomes
    assert [m.rank for m in new.members] == list(range(len(becomes)))
    assert len({m.incarnation for m in new.members}) == len(becomes)
    assert set(new.standby) == waits.keys() - {m.incarnation for m in new.members}


def test_a_larger_world_says_who_has_come():
    new = by_node(start(a=2), (0, 1), spare_node("s", 2) | spare_node("t", 2))
    assert new.reason == "generation 1: ranks 0-1 kept; ranks 2-5 on s and t"


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


def test_an_endless_fault_is_told_once_with_its_count():
    (same,) = {Fault(0, "exception", "worker", rank=1, step=4, text="ZeroDivisionError: division by zero")}
    reason = policy.decide(Policy(2), 2, [replace(same, generation=g) for g in range(3)]).reason
    told = "exception of rank 1 after step 4 (ZeroDivisionError: division by zero), in generations 0-2"
    assert reason == f"3 faults in a row without a new step in between, the last: {told}"


def test_faults_that_differ_are_told_one_by_one():
    """Three alike end it, not necessarily one after the other; of a stack only its first line is told."""
    a = Fault(3, "exception", "worker", rank=0, step=4, text="ValueError: a\nand more")
    b = Fault(4, "death", "agent", rank=1, step=4, text="ended by signal 9")
    row = [replace(a, step=2), replace(a, generation=3), b, replace(a, generation=5), replace(b, generation=6)]
    assert policy.decide(Policy(2), 6, row).go_on
    verdict = policy.decide(Policy(2), 7, [*row, replace(a, generation=7)])
    assert not verdict.go_on
    assert verdict.reason.splitlines() == [
        "5 faults in a row without a new step in between, 3 of them alike, the last: "
        "exception of rank 0 after step 4 (ValueError: a)",
        "  generation 3: exception of rank 0 after step 4 (ValueError: a)",
        "  generation 4: death of rank 1 after step 4 (ended by signal 9)",
        "  generation 5: exception of rank 0 after step 4 (ValueError: a)",
        "  generation 6: death of rank 1 after step 4 (ended by signal 9)",
        "  generation 7: exception of rank 0 after step 4 (ValueError: a)",
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("exception", 0, "a"), ("exception", 0, "b"), True),
        (("exception", 0, "a"), ("exception", 1, "a"), True),
        (("exception", 0, "a"), ("exception", 1, "b"), False),
        (("exception", 0, ""), ("exception", 1, ""), False),
        (("death", 0, "ended by signal 9"), ("death", 1, "ended by signal 9"), False),
        (("death", 0, "ended by signal 9"), ("exception", 0, "ended by signal 9"), False),
        (("stall", 0, "after 3 s"), ("stall", 1, "after 4 s"), True),
    ],
)
def test_what_may_be_the_same_again(one, other, same):
    first, second = (Fault(0, kind, "worker", rank=rank, text=text) for kind, rank, text in (one, other))
    assert policy.alike(first, second) is policy.alike(second, first) is same


def test_patience_ends_too_and_long_stories_are_cut():
    row = [Fault(g, "death", "agent", rank=g % 20, step=1, attempted=False) for g in range(20)]
    assert policy.decide(Policy(20), 8, row[:9]).go_on
    assert not policy.decide(Policy(20), 9, row[:10]).go_on
    reason = policy.decide(Policy(20, max_restarts=19), 19, row).reason
    assert "all 19 restarts" in reason
    assert reason.splitlines()[1] == "  8 others before these"
    assert len(reason.splitlines()) == 2 + policy.MOST_TOLD
    assert reason.endswith("generation 19: death of rank 19 after step 1, before the generation was entered")


def test_what_nobody_could_attempt_is_no_attempt():
    early = [Fault(g, "death", "agent", rank=1, step=4, attempted=False) for g in range(5)]
    assert policy.decide(Policy(2), 4, early).go_on


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


@pytest.mark.parametrize(
    "text", ["SyntaxError: invalid syntax (train.py, line 1)", "TabError: inconsistent use of tabs"]
)
def test_what_is_no_python_is_begun_once_however_many_restarts_are_allowed(text):
    """W34: nothing else burns a restart that cannot succeed so surely."""
    verdict = policy.decide(Policy(2, max_restarts=9), 0, [Fault(0, "script", "worker", rank=1, text=text)])
    assert not verdict.go_on
    assert verdict.reason == f"the script is no Python, and no restart mends that: script of rank 1 ({text})"
    raised = [Fault(0, "exception", "worker", rank=1, text=text)]
    assert policy.decide(Policy(2, max_restarts=9), 0, raised).go_on, "of code that a running script has made"


def test_a_gap_that_nobody_fills_is_closed_and_those_above_move_down():
    old = start(a=1, b=1, c=1, d=1)
    new = assignment.following(old, survivors(old, 0, 2, 3), {})
    assert [(m.rank, m.node, m.why) for m in new.members] == [(0, "a", "kept"), (1, "c", "kept"), (2, "d", "kept")]
    assert new.reason == "generation 1: 3 ranks go on; rank 1 of the last one is lost"


def test_the_first_roster_takes_each_node_s_share_whoever_came_with_more():
    standbys = standby(0, "b") | standby(1, "b") | standby(2, "b") | standby(0, "a") | standby(1, "a")
    roster = assignment.first(0, 4, standbys, (("a", 2), ("b", 2)))
    assert [(m.rank, m.node, m.slot) for m in roster.members] == [(0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1)]
