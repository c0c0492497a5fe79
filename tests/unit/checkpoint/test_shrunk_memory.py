"""A world that has lost ranks goes on from the snapshots of all of them in the memory of the node (docs/adr/0014)."""

import random

import pytest
import torch
import xxhash
from torch import nn

from everstep.checkpoint.core.segment import HEADER_BYTES, Header, put_checksum
from everstep.data import GlobalSampler
from everstep.errors import DamagedCheckpoint, StateMismatch


class Box:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def states(size, seed=0, boxed=lambda rank: 5):
    """Equal models on all ranks, as after DDP; a position of the whole world; generators of each rank's own."""
    made = []
    for rank in range(size):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        sampler = GlobalSampler(100, rank=rank, world_size=size)
        made.append({"model": model, "box": Box(boxed(rank)), "loader": sampler})
    return made


def train(workers, given, steps):
    for step in steps:
        for worker, state in zip(workers, given, strict=True):
            with torch.no_grad():
                state["model"].weight.add_(1)
            next(iter(state["loader"]))
            random.seed(1000 * step + worker.rank)
            worker.take(step)


def begin(bench, size, **more):
    b = bench(size, **more)
    workers, given = b.enter(), states(size)
    for worker, state in zip(workers, given, strict=True):
        worker.bind(state)
    return b, workers, given


def restored(worker, state):
    worker.bind(state)
    recovered = worker.restore()
    worker.restore_generators()
    return recovered


def test_those_who_are_left_take_up_what_all_had_and_the_lost_one_s_memory_is_freed(bench):
    b, workers, given = begin(bench, 3)
    train(workers, given, range(1, 6))
    expected, position = given[0]["model"].weight.clone(), given[0]["loader"].consumed
    assert position == 15
    full = b.shelf.bytes
    left = b.enter(replace=(1, 2), world_size=2)
    assert b.shelf.plan.reason == (
        "step 5 from memory: the newest that all 3 ranks hold, of lineage 0.0; 2 ranks take it up"
    )
    assert b.told[0]["restore"] == {"step": 5, "tier": "memory", "saved_by": 3}
    fresh = states(2, seed=9)
    for rank, (worker, state) in enumerate(zip(left, fresh, strict=True)):
        assert restored(worker, state).step == 5
        assert state["model"].weight.equal(expected)
        assert (state["box"].value, state["loader"].consumed) == (5, position)
        drawn = random.random()
        assert drawn == random.Random(5000 + rank).random()
    assert b.shelf.bytes == full, "kept until all have sealed a snapshot of their own"
    left[0].resettle(5)
    assert len([s for s in b.shelf.sealed() if (s.world_size, s.step) == (3, 5)]) == 3
    left[1].resettle(5)
    assert {s.rank for s in b.shelf.sealed()} == {0, 1}
    assert b.shelf.bytes == full * 2 // 3
    train(left, fresh, range(6, 9))
    again = b.enter()
    assert b.shelf.plan.reason == "step 8 from memory: the newest that all 2 ranks hold, of lineage 0.1"
    assert [restored(worker, state).step for worker, state in zip(again, states(2), strict=True)] == [8, 8]


def test_a_fault_before_all_have_sealed_begins_from_the_old_world_again(bench):
    """And once more by a world that is smaller still."""
    b, workers, given = begin(bench, 3)
    train(workers, given, range(1, 6))
    expected = given[0]["model"].weight.clone()
    left = b.enter(replace=(2,), world_size=2)
    restored(left[0], states(2)[0])
    left[0].resettle(5)
    (alone,) = b.enter(replace=(1,), world_size=1)
    assert b.told[0]["restore"] == {"step": 5, "tier": "memory", "saved_by": 3}
    (state,) = states(1, seed=3)
    restored(alone, state)
    assert state["model"].weight.equal(expected)
    alone.resettle(5)
    train([alone], [state], [6])
    assert {(s.rank, s.step) for s in b.shelf.sealed()} >= {(0, 6)}
    assert {s.rank for s in b.shelf.sealed()} == {0}


def test_what_all_began_from_is_overwritten_by_nobody_meanwhile(bench):
    b, workers, given = begin(bench, 3)
    train(workers, given, range(1, 6))
    left = b.enter(replace=(2,), world_size=2)
    fresh = states(2)
    restored(left[0], fresh[0])
    train(left[:1], fresh[:1], range(6, 20))  # it runs apart; the other is slow
    assert restored(left[1], fresh[1]).step == 5
    assert fresh[1]["model"].weight.equal(given[0]["model"].weight)


def test_a_part_that_cannot_be_read_is_struck_out_and_an_older_step_taken(bench):
    b, workers, given = begin(bench, 3)
    train(workers, given, range(1, 6))
    left = b.enter(replace=(2,), world_size=2)
    source = b.shelf.plan.sources[2]
    segment = b.shelf._segment(2, source)
    header = segment.header()
    assert isinstance(header, Header)
    segment._map[header.meta_offset] ^= 1
    left[0].bind(states(2)[0])
    with pytest.raises(DamagedCheckpoint, match=rf"rank 2: buffer {source} should hold .* step 5 but: damaged"):
        left[0].restore()
    left = b.enter()
    assert b.shelf.plan.step == 4
    assert [restored(worker, state).step for worker, state in zip(left, states(2), strict=True)] == [4, 4]


def test_what_belongs_to_a_rank_alone_is_refused_by_name(bench):
    b = bench(3)
    workers, given = b.enter(), states(3, boxed=lambda rank: rank)
    for worker, state in zip(workers, given, strict=True):
        worker.bind(state)
    train(workers, given, [1])
    left = b.enter(replace=(2,), world_size=2)
    (state, _) = states(2, seed=4)
    before = state["model"].weight.clone()
    left[0].bind(state)
    with pytest.raises(StateMismatch, match="box/value is 0 on rank 0 and 1 on rank 1"):
        left[0].restore()
    assert state["model"].weight.equal(before)


def test_a_step_that_is_not_whole_is_no_beginning(bench):
    b, workers, given = begin(bench, 3)
    train(workers, given, [1])
    b.shelf._segment(2, max(s.buffer for s in b.shelf.sealed() if s.rank == 2)).void()
    b.enter(replace=(2,), world_size=2)
    assert b.told[0]["restore"] is None
    assert b.told[0]["unfit"] == "step 1 in memory is of 3 ranks"
    assert HEADER_BYTES == 4096


# A payload that changed in memory (CL-17): whoever read it first has left its checksum.


def hash_all(b):
    for each in b.shelf._sets.values():
        for segment in each.segments.values():
            found = segment.header()
            if isinstance(found, Header):
                payload = segment._map[found.payload_offset :][: found.payload_bytes]
                put_checksum(segment._map, found, xxhash.xxh3_64_intdigest(payload))


@pytest.mark.parametrize("size", [2, 3])
def test_a_bit_of_a_hashed_copy_is_noticed_and_an_older_step_taken(bench, size):
    b, workers, given = begin(bench, 3)
    train(workers, given, range(1, 6))
    hash_all(b)
    segment = b.shelf._segment(0, max((s.step, s.buffer) for s in b.shelf.sealed() if s.rank == 0)[1])
    segment._map[HEADER_BYTES + 2] ^= 1
    left = b.enter(replace=(2,), world_size=size)
    fresh = states(size)
    left[0].bind(fresh[0])
    before = fresh[0]["model"].weight.clone()
    with pytest.raises(DamagedCheckpoint, match=r"step 5 but: damaged: its payload has checksum .* changed in memory"):
        left[0].restore()
    assert fresh[0]["model"].weight.equal(before)
    b.enter()
    assert b.shelf.plan.step == 4, "struck out, not tried for ever"


def test_a_copy_that_is_only_sealed_is_trusted_by_its_seal(bench):
    b, workers, given = begin(bench, 2)
    train(workers, given, range(1, 4))
    again = b.enter()
    assert [restored(worker, state).step for worker, state in zip(again, states(2), strict=True)] == [3, 3]
