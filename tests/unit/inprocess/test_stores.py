"""NVRx's stores: what ranks tell each other around a restart, over torch's own, in one process."""

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")
import torch.distributed as dist

from everstep.inprocess import attribution, store
from everstep.inprocess.state import Mode, State

SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=20)


class Memory(store.StoreMixin, dist.HashStore):
    """What users derive looks like this. For one thread: a HashStore that two wait in stands still (torch 2.13)."""


@pytest.fixture(params=["file", "tcp", "prefix"])
def made(request, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "tcp":
        return store.TCPStore("127.0.0.1", 0, 1)
    made = store.FileStore(str(tmp_path / "store"), 1)
    return made if request.param == "file" else store.PrefixStore(3, made)


def test_a_barrier_waits_for_all_and_says_who_is_missing(made):
    """W9: since torch 2.13 its stores have a `barrier` of their own, which hid NVRx's."""
    done = []
    one = threading.Thread(target=lambda: (made.barrier([0], "a", 2, LONG, SHORT), done.append(0)))
    one.start()
    made.barrier([1], "a", 2, LONG)
    one.join(20)
    assert done == [0]
    with pytest.raises(store.BarrierTimeout, match="1 of 2 ranks have come to the barrier 'b'"):
        made.barrier([0], "b", 2, SHORT)
    with pytest.raises(store.BarrierOverflow, match="give each use its name"):
        made.barrier([0, 1], "b", 2, SHORT)
    made.initial_barrier([0, 1], rendezvous_count=2, timeout=LONG)


def test_a_reentrant_barrier_counts_each_rank_once(made):
    for _ in range(3):
        with pytest.raises(store.BarrierTimeout):
            made.iteration_barrier([0], rendezvous_count=2, timeout=SHORT)
    assert made.is_rank_at_reentrant_barrier(0, made.ITERATION_BARRIER)
    assert not made.is_rank_at_reentrant_barrier(1, made.ITERATION_BARRIER)
    made.iteration_barrier([0, 1], rendezvous_count=2, timeout=LONG)
    made.iteration_barrier([1], rendezvous_count=2, timeout=LONG)


def test_what_is_recorded_comes_back_as_what_it_was(made):
    """W8: NVRx's `get_initial_ranks` returns bytes, which end the job later."""
    made.set_initial_rank(0, 5)
    made.set_initial_rank(1, 4)
    assert made.get_initial_ranks([0, 1]) == [5, 4]
    made.record_terminated_ranks([3, 1])
    made.record_terminated_ranks([2])
    assert made.get_terminated_ranks() == {1, 2, 3}
    made.set_active_rank(0, None)
    made.set_active_rank(1, 0)
    assert made.get_all_active_ranks(2) == [None, 0]
    made.send_heartbeat(0)
    assert made.get_heartbeat(0) == made.get_all_heartbeats(1)[0] > 1e9
    state = State(1, 4, active_rank=1, mode=Mode.ACTIVE, fn_exception=ValueError("not sent"))
    made.send_state(state, 1)
    assert made.get_states([1]) == [State(1, 4, active_rank=1, mode=Mode.ACTIVE)]
    made.send_key(["job", "node-1"], 1)
    assert made.get_keys([1]) == [["job", "node-1"]]
    assert made.get_packed("missing", ",") == []
    made.set("packed", "a,b,")
    assert made.get_packed("packed", ",") == ["a", "b"]


def test_reasons_are_kept_until_they_are_locked(made):
    record = attribution.InterruptionRecord(0, attribution.Interruption.EXCEPTION)
    made.record_interrupted([record])
    made.wait_for_interrupted(LONG)
    made.lock_interruption_records()
    made.record_interrupted([attribution.InterruptionRecord(1, attribution.Interruption.TERMINATED)])
    assert made.get_interruption_records() == [record]
    made.record_completed()
    made.wait_for_completed(LONG)


def test_an_exchange_may_be_repeated_and_names_who_is_silent(made):
    assert made.exchange("x", 0, "a", [0], LONG) == {0: "a"}
    assert made.exchange("x", 0, "b", [0], LONG) == {0: "b"}
    with pytest.raises(store.BarrierTimeout, match="what rank 1 says about 'x'"):
        made.exchange("x", 0, "c", [0, 1], SHORT)


def test_an_arrival_costs_the_same_for_any_number_of_ranks():
    """W17: NVRx reads the whole list of arrivals at each; here an arrival is one counter and one key."""

    class Counting(Memory):
        calls = 0

        def add(self, *arguments):
            self.calls += 1
            return super().add(*arguments)

        def get(self, *arguments):
            self.calls += 1
            return super().get(*arguments)

    costs = {}
    for world in (4, 400):
        shared = Counting()
        for rank in range(world - 1):
            with pytest.raises(store.BarrierTimeout):
                shared.barrier([rank], "a", world, timedelta(0))
        shared.calls = 0
        shared.barrier([world - 1], "a", world, LONG)
        costs[world] = shared.calls
    assert costs[4] == costs[400] <= 2


def test_a_host_whose_port_is_taken_joins(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    first = store.TCPStore("127.0.0.1", 0, 1)
    again = store.TCPStore("127.0.0.1", first.port, 1, wait_for_workers=False)
    first.set("a", "b")
    assert again.get("a") == b"b"
    assert first.critical_ranks == (0,)
    assert Memory().critical_ranks == ()
