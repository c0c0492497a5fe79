"""Faults in a world without an agent: an exception or a hang costs a generation, a death ends or shrinks the world."""

import os
import statistics
import sys
import time

import pytest

pytestmark = pytest.mark.procs


def rank_of(rank, front, env, **settings):
    """Inside a forked rank: be what the launcher started."""
    sys.path.insert(0, os.path.dirname(__file__))
    from peer_rank import Rank

    return Rank(rank, front, env, **settings)


def told_of(call):
    """What the call raised, as text."""
    from everstep.errors import JobEnded

    began = time.monotonic()
    try:
        call()
    except JobEnded as ended:
        return {"story": str(ended), "seconds": time.monotonic() - began}
    return {"story": "", "seconds": 0.0}


# -- exceptions --------------------------------------------------------------------------------------------------------


def each_in_turn(rank, port, front, env, faults, agents_store):
    """Generation g fails on rank g; the last one completes. With `agents_store` another's store has the front port."""

    def body(me, place):
        if place.generation < faults and place.rank == place.generation % place.world_size:
            me.harmed[place.generation] = time.monotonic()
            me.harm("exception")
        return place.rank * 10

    env |= {"TORCHELASTIC_RUN_ID": "none"} if agents_store else {}
    me = rank_of(rank, port if agents_store else front, env)
    began = time.monotonic()
    returned = me.call(body)
    return {"returned": returned, "seen": me.seen, "began": began, "entered": me.entered, "harmed": me.harmed}


def costs(found):
    """Say what a fault costs: from the raise to the first sum of the next generation on the slowest rank."""
    harmed = {int(g): at for told in found for g, at in told["harmed"].items()}
    back = [max(told["entered"].get(str(g + 1), 0.0) for told in found) - at for g, at in harmed.items()]
    # a rank that is late is called to the next generation before it has entered the first
    begun = max(told["entered"]["0"] - told["began"] for told in found if "0" in told["entered"])
    word = f"{1000 * statistics.median(back):.0f} ms (slowest {1000 * max(back):.0f})"
    print(f"\n{len(found)} ranks, {len(back)} faults: {word}; start {begun:.1f} s")


def check_each_in_turn(found, ranks, faults):
    """A rank may be called back before it has noted its sum; where it was the culprit, and at last, it has."""
    for rank, told in enumerate(found):
        assert told["returned"] == rank * 10
        seen = [row[0] for row in told["seen"]]
        assert told["seen"] == [[generation, rank, ranks, ranks] for generation in seen]
        assert {*range(rank, faults, ranks), faults} <= set(seen)
    costs(found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exception_on_each_rank_in_turn_under_bare_processes(bare, ranks):
    found = bare.run(each_in_turn, ranks, faults=ranks, agents_store=False)
    check_each_in_turn(found, ranks, ranks)


def test_the_same_where_a_store_of_another_has_the_port(bare):
    """As under torchrun, whose agent's store is at MASTER_PORT; and so it stays for the script."""
    found = bare.run(each_in_turn, 2, faults=2, agents_store=True)
    check_each_in_turn(found, 2, 2)


def test_generations_in_a_row(bare):
    check_each_in_turn(bare.run(each_in_turn, 4, faults=9, agents_store=False), 4, 9)


@pytest.mark.long
def test_two_hundred_generations_in_a_row(bare):
    check_each_in_turn(bare.run(each_in_turn, 4, limit_s=240, faults=199, agents_store=False), 4, 199)


def until_the_hubs_store_has_served(rank, port, front, env, generations):
    """Rank 0 fails in each generation until as many have met on the store of the hub's own, which takes seconds."""
    import torch.distributed as dist

    held = []  # the port of each generation's store, and how many keys were in it

    def body(me, place):
        dist.barrier()  # all have made their groups, and with them all keys
        held.append((place.store[1], dist.distributed_c10d._get_default_store().num_keys()))
        early = place.store[1] == held[0][0] and len(held) < 200  # or it served before the first of us came
        if rank == 0 and (early or sum(where == place.store[1] for where, _ in held) < generations):
            time.sleep(0.3 * early)
            me.harm("exception")

    me = rank_of(rank, front, env)
    me.call(body)
    return held


def test_the_store_holds_the_keys_of_the_present_generation(bare):
    """And at most those of the last beside them (IR-04); the one of rank 0's process serves for the first seconds."""
    for held in bare.run(until_the_hubs_store_has_served, 2, limit_s=150, generations=8):
        port, _ = held[-1]
        keys = [count for where, count in held if where == port]
        assert len(keys) > 4
        assert max(keys) < 3 * min(keys), keys


def endless(rank, port, front, env):
    def body(me, place):
        if place.rank == 1:
            me.harm("exception")
        time.sleep(1000)

    me = rank_of(rank, front, env, max_restarts=2)
    return told_of(lambda: me.call(body)) | {"seen": me.seen}


def test_a_fault_that_never_ends_ends_with_its_story(bare):
    found = bare.run(endless, 2)
    for told in found:
        assert "all 2 restarts" in told["story"]
        assert "ValueError: planned" in told["story"]
    assert [row[0] for row in found[1]["seen"]] == [0, 1, 2]


# -- hangs -------------------------------------------------------------------------------------------------------------


def one_fault(rank, port, front, env, kind, culprit, settings):
    """Generation 0 has one fault on one rank; whoever goes on tells what it saw."""

    def body(me, place):
        if place.generation == 0 and place.rank == culprit:
            me.harm(kind)

    me = rank_of(rank, front, env, **settings)
    return told_of(lambda: me.call(body)) | {"seen": me.seen, "entered": me.entered}


def test_a_rank_that_sleeps_for_ever_is_called_back(bare):
    for told in bare.run(one_fault, 2, kind="sleep", culprit=1, settings={"soft_s": 1.0}):
        assert told["story"] == ""
        assert told["seen"][-1][0] == 1


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_death_of_a_rank_ends_the_others_with_a_story(bare, culprit):
    found = bare.outcomes(one_fault, 3, kind="kill", culprit=culprit, settings={})
    assert found[culprit] == {"died": -9}
    for rank in {0, 1, 2} - {culprit}:
        told = found[rank]["value"]
        assert f"rank {culprit} is lost (death: its process has ended)" in told["story"]
        assert "everstep run" in told["story"]
        assert told["seconds"] < 20


@pytest.mark.parametrize("culprit", [0, 2])
def test_where_the_world_may_shrink_the_others_go_on(bare, culprit):
    found = bare.outcomes(one_fault, 3, kind="kill", culprit=culprit, settings={"min_world_size": 2})
    assert found[culprit] == {"died": -9}
    ranks = sorted({0, 1, 2} - {culprit})
    for new, old in enumerate(ranks):
        told = found[old]["value"]
        assert told["story"] == ""
        assert told["seen"][-1] == [1, new, 2, 2]
        print(f"\nrank {old}: {1000 * (told['entered']['1'] - told['entered']['0']):.0f} ms from one sum to the next")


@pytest.mark.parametrize(("kind", "word"), [("lock", "interpreter has not run"), ("stop", "has not run")])
def test_a_process_that_does_not_hear_is_ended_at_the_hard_limit(bare, kind, word):
    found = bare.outcomes(one_fault, 2, kind=kind, culprit=0, settings={"hard_s": 1.5})
    assert found[0] == {"died": -9}
    assert "rank 0 is lost" in found[1]["value"]["story"]
    assert word in found[1]["value"]["story"]


def asks_for_the_end(rank, port, front, env):
    def body(me, place):
        if place.rank == 1:
            me.harm("exit")
        time.sleep(1000)

    me = rank_of(rank, front, env)
    try:
        return told_of(lambda: me.call(body))
    except SystemExit as end:
        return {"exit": end.code}


def test_a_rank_that_asks_for_the_end_ends_all(bare):
    first, second = bare.run(asks_for_the_end, 2)
    assert second == {"exit": 3}
    assert "rank 1: SystemExit: 3" in first["story"]
