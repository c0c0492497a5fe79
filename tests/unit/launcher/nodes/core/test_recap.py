"""What a node hears that comes while the job runs: it steps to where the others stand, whatever was before."""

from everstep.launcher.nodes.core.recap import Recap
from everstep.launcher.peers.core import facts
from everstep.recovery.core import world
from everstep.recovery.core.words import (
    UNKNOWN_STATUS,
    Announced,
    Arrived,
    Completed,
    Died,
    Facts,
    Fault,
    Faulted,
    Incarnation,
    Member,
    Policy,
    Published,
    Roster,
)

POLICY = Policy(2, local_world_size=1, by_node=True, whole=True, min_world_size=1)
A, B, S, T = (Incarnation(node, 1, 1) for node in "abst")


def announced(who):
    return facts.encode(Announced(who, Facts(who.boot_id, 0, fresh=True)))


def published(generation, *whom):
    members = tuple(Member(rank, who, who.boot_id, 0, True, "kept") for rank, who in enumerate(whom))
    return {**facts.encode(Published(Roster(0, generation, members))), "store": ["h", 1]}


def kept(node, generation):
    return {"is": "kept", "node": node, "generation": generation, "told": {}}


def recap(*told):
    found = Recap()
    for fact in told:
        found.hear(fact)
    return found


def view(found, present):
    """The world as a node sees it that comes now."""
    seen = world.begin("new", POLICY, generation=found.generation)
    for fact in found.told(dict.fromkeys(present, "address")):
        if fact["is"] != "kept":
            seen, _ = world.step(seen, facts.decode(fact), 0.0)
    return seen


BEGUN = (announced(A), announced(B), announced(S), kept("a", 0), kept("b", 0), published(0, A, B))


def test_before_the_first_roster_there_is_nothing_to_tell():
    assert not recap(announced(A)).possible
    assert recap(*BEGUN).possible


def test_who_comes_into_a_running_world_knows_its_roster_and_who_waits():
    seen = view(recap(*BEGUN), "abs")
    assert (seen.phase, seen.generation, dict(seen.ranks), set(seen.standbys)) == (
        world.Phase.RUNNING, 0, {A: 0, B: 1}, {S},
    )  # fmt: skip


def test_what_was_told_since_the_roster_is_told_again_and_what_was_before_is_not():
    fault = facts.encode(Faulted(Fault(0, "exception", "worker", A, 0, 3)))
    brought = Facts("a", 0, fresh=False, former_rank=0)
    arrived = facts.encode(Arrived(1, A, brought, ()))
    found = recap(*BEGUN, fault, arrived, kept("a", 1))
    seen = view(found, "abs")
    assert (seen.phase, seen.generation, set(seen.here)) == (world.Phase.GATHERING, 1, {A})
    assert found.told({})[-1] == kept("a", 1)
    found.hear(kept("b", 1))
    found.hear(published(1, A, B))
    told = found.told(dict.fromkeys("abs", ""))
    assert fault not in told
    assert arrived not in told
    assert [one["node"] for one in told if one["is"] == "kept"] == ["a", "b"]
    done = facts.encode(Completed(1, A))
    found.hear(done)
    assert found.told({})[-1] == done


def test_members_that_died_are_dead_and_a_node_that_is_gone_is_known_to_be():
    found = recap(*BEGUN, {"is": "gone", "node": "b", "why": ""})
    seen = view(found, "as")
    assert (seen.phase, set(seen.lost), seen.gone) == (world.Phase.GATHERING, {B}, {"b"})
    assert seen.vacant == 0, "the node without ranks takes what was there"
    again = view(found, "asb")  # another has its name by now
    assert (set(again.lost), again.gone) == ({B}, frozenset())


def test_who_was_dead_before_its_roster_was_told_is_dead():
    told = [announced(A), announced(B), facts.encode(Died(B, -9)), published(0, A, B)]
    assert set(view(recap(*told), "ab").lost) == {B}
    told[2] = {"is": "gone", "node": "b", "why": ""}
    death = next(one for one in recap(*told).told({"a": ""}) if one["is"] == "Died")
    assert (death["status"], death["gone"]) == (UNKNOWN_STATUS, "b")


def test_standbys_that_are_gone_are_not_told_of_and_new_ones_of_that_name_are():
    new = Incarnation("s", 2, 1)
    found = recap(*BEGUN, {"is": "gone", "node": "s", "why": ""}, announced(new), announced(T))
    found.hear(facts.encode(Died(T, -9)))
    assert set(view(found, "abs").standbys) == {new}
