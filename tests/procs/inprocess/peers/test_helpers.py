"""Whatever helps a rank may die or freeze too; and ranks that never come, come twice, or call twice."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs


def rank_of(rank, front, env, **settings):
    """Inside a forked rank: be what the launcher started."""
    sys.path.insert(0, os.path.dirname(__file__))
    from peer_rank import Rank

    return Rank(rank, front, env, **settings)


def told_of(call):
    from everstep.errors import EverstepError

    try:
        return {"returned": call(), "story": ""}
    except EverstepError as error:
        return {"returned": None, "story": str(error)}


def helpers(mark, word):
    """The pids of this test's processes whose command line holds `word`."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            marked = name.isdigit() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes()
            if marked and word in Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(int(name))
    return found


def watcher_of(pid, mark):
    """The watcher of `pid`: its command line ends with it."""
    return [found for found in helpers(mark, "peers.watcher") if _last_word(found) == str(pid)]


def _last_word(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1].decode()


# -- helpers die -------------------------------------------------------------------------------------------------------


def hurts(rank, port, front, env, what, number, settings):
    """In generation 0, rank 1 hurts a helper and then waits; in a later one all complete."""

    def body(me, place):
        if place.generation:
            return place.generation
        if place.rank == 1:
            victims = watcher_of(os.getpid(), mark) if what == "watcher" else helpers(mark, what)
            assert len(victims) == 1, victims
            os.kill(victims[0], number)
        time.sleep(1000)
        return None

    mark = env["EVERSTEP_TEST_MARK"]
    me = rank_of(rank, front, env, **settings)
    return told_of(lambda: me.call(body))


def test_a_watchers_death_is_its_ranks_and_the_others_know(bare):
    first, second = bare.outcomes(hurts, 2, what="watcher", number=signal.SIGKILL, settings={})
    assert "error" not in second
    assert second == {"died": 1}
    assert "rank 1 is lost" in first["value"]["story"]


def test_a_watchers_death_where_the_world_may_shrink(bare):
    first, second, third = bare.outcomes(
        hurts, 3, what="watcher", number=signal.SIGKILL, settings={"min_world_size": 2}
    )  # fmt: skip
    assert second == {"died": 1}
    assert [told["value"] for told in (first, third)] == [{"returned": 1, "story": ""}] * 2


def test_a_frozen_watcher_is_found_out_by_its_own_rank_too(bare):
    """The others have lost its rank by then, by the hub's lease."""
    first, second = bare.outcomes(hurts, 2, what="watcher", number=signal.SIGSTOP, settings={})
    assert second == {"died": 1}
    assert "rank 1 is lost" in first["value"]["story"]


def test_the_hubs_death_ends_all_with_a_story(bare):
    for told in bare.run(hurts, 2, what="peers.hub", number=signal.SIGKILL, settings={}):
        assert "the connection to the hub, which rank 0's process started, has ended" in told["story"]


def test_a_frozen_hub_is_not_waited_for(bare):
    """The watcher of rank 0, whose process has started it, ends it; the other may hear of that end first."""
    first, second = bare.run(hurts, 2, what="peers.hub", number=signal.SIGSTOP, settings={})
    assert "has not been heard for 8 s" in first["story"]
    assert "hub, which rank 0's process started" in second["story"]


def loses_stores(rank, port, front, env):
    """Ranks meet in rank 0's process at first, then in the store's own; that one is killed, until another has come."""
    ports = []

    def body(me, place):
        if place.store[1] not in ports:
            ports.append(place.store[1])
        if len(ports) == 3:
            return "done"
        if place.rank == 1:
            if place.store[1] in ports[1:]:
                (victim,) = helpers(env["EVERSTEP_TEST_MARK"], "store.host")
                os.kill(victim, signal.SIGKILL)
            time.sleep(0.5)
            me.harm("exception")
        time.sleep(1000)
        return None

    me = rank_of(rank, front, env)
    return told_of(lambda: me.call(body))


def test_the_stores_death_costs_nothing_and_the_next_generation_has_another(bare):
    assert bare.run(loses_stores, 2) == [{"returned": "done", "story": ""}] * 2


# -- beginnings --------------------------------------------------------------------------------------------------------


def lonely(rank, port, front, env, comes):
    if rank not in comes:
        return {"returned": None, "story": "did not come"}
    return told_of(rank_of(rank, front, env, start_deadline_s=2.0).call)


def test_a_rank_that_never_comes_is_named_after_a_while(bare):
    found = bare.run(lonely, 3, comes=[0, 1])
    for told in found[:2]:
        assert "waited 2" in told["story"]
        assert "for 1 of 3 ranks" in told["story"]


def test_without_rank_0_the_others_say_where_they_looked(bare):
    told = bare.run(lonely, 2, comes=[1])[1]
    assert "rank 1 of 2 has not found rank 0 at 127.0.0.1:" in told["story"]
    assert "MASTER_PORT the same on all ranks" in told["story"]


def stale_word(rank, port, front, env):
    """torchrun's store outlives the ranks that it starts again: an address of theirs may still stand in it."""
    import torch.distributed as dist

    if rank == 1:
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set(
            "everstep/hub/none/0/0", f"127.0.0.1 {front}"
        )
    else:
        time.sleep(1.0)  # rank 1 has read the old word by then
    me = rank_of(rank, port, env | {"TORCHELASTIC_RUN_ID": "none"})
    return told_of(lambda: me.call(lambda me, place: place.rank))


def test_an_address_of_ranks_before_us_is_not_gone_to(bare):
    assert bare.run(stale_word, 2) == [{"returned": rank, "story": ""} for rank in (0, 1)]


def test_a_script_may_call_again(bare):
    assert bare.run(calls_twice, 2) == [[[0, 1], [0, 1]]] * 2


def calls_twice(rank, port, front, env):
    def body(me, place):
        if place.generation == 0 and place.rank == 1:
            me.harm("exception")
        return place.generation

    found = []
    for _ in range(2):
        me = rank_of(rank, front, env)
        me.call(body)
        found.append([row[0] for row in me.seen])
    return found


# -- what users bring --------------------------------------------------------------------------------------------------


def own_store(rank, port, front, env, inside):
    """A script as NVRx's users had to write it: a store and a port of its own, a prefix for each iteration."""
    import datetime

    import torch.distributed as dist

    def body(me, place):
        if place.generation < 2 and place.rank == place.generation:
            me.harm("exception")
        return place.generation

    def store():
        return dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size=2, is_master=rank == 0,
            multi_tenant=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20),
        )  # fmt: skip

    def init(place):
        base = store() if inside else before
        prefixed = dist.PrefixStore(str(place.generation), base)
        dist.init_process_group("gloo", store=prefixed, rank=place.rank, world_size=place.world_size)

    me = rank_of(rank, front, env)
    if rank == 1 and not inside:
        time.sleep(0.3)  # rank 0's store has to be there first, as in any script
    before = None if inside else store()
    return {"returned": me.call(body, init), "seen": me.seen}


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made before the call"])
def test_a_script_brings_its_own_store_port_and_prefix(bare, inside):
    """At MASTER_PORT itself, too: the hub has left it by then, or has found the script's store there."""
    for rank, told in enumerate(bare.run(own_store, 2, inside=inside)):
        assert told["returned"] == 2
        assert told["seen"][-1] == [2, rank, 2, 2]
