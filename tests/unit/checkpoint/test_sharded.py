"""DTensors: each rank's rectangle says where it lies in the whole, uneven and empty ones too; no rank is asked."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from everstep.checkpoint.tensors import Collector
from everstep.checkpoint.walk import StateWalk


def leaf_of(value: DTensor):
    collector = Collector("model")
    collector.tensor("model/w", value)
    return collector.leaves[0]


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_shards_of_all_ranks_tile_the_whole(rows, world, as_rank):
    whole = torch.arange(rows * 3.0).view(rows, 3)
    seen = torch.zeros(rows, 3)
    for rank in range(world):
        as_rank(rank, world)
        mesh = init_device_mesh("cpu", (world,))
        chunks = [*whole.chunk(world), *[whole[:0]] * world]
        value = DTensor.from_local(chunks[rank], mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(3, 1))
        leaf = leaf_of(value)
        assert leaf.whole_shape == (rows, 3)
        assert leaf.placements == ("S(0)",)
        assert not leaf.per_rank
        if leaf.nbytes:
            start, columns = leaf.starts
            assert columns == 0
            seen[start : start + leaf.shape[0]] += 1
            assert whole[start : start + leaf.shape[0]].equal(chunks[rank])
    assert seen.eq(1).all()


def test_a_hybrid_mesh_gives_replicas_the_same_rectangle(as_rank):
    whole = torch.arange(20.0).view(5, 4)
    rectangles = {}
    for rank in range(4):
        as_rank(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        local = whole.chunk(2)[rank % 2]
        value = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1))
        leaf = leaf_of(value)
        rectangles[rank] = (leaf.starts, leaf.shape)
        assert leaf.placements == ("R", "S(0)")
        assert not leaf.replicated  # not on every rank
    assert rectangles == {0: ((0, 0), (3, 4)), 1: ((3, 0), (2, 4)), 2: ((0, 0), (3, 4)), 3: ((3, 0), (2, 4))}


def test_a_replicated_dtensor_is_replicated_and_a_partial_one_is_refused(as_rank):
    as_rank(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    assert leaf_of(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)).replicated
    with pytest.raises(TypeError, match=r"partial placement.*Redistribute"):
        leaf_of(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    fully_shard(made[0])
    return fully_shard(made)


def test_fsdp2_is_walked_by_its_shards(as_rank):
    names = {}
    for rank, world in itertools.product(range(3), [3]):
        as_rank(rank, world)
        sharded = model()
        optimizer = torch.optim.AdamW(sharded.parameters())
        for parameter in sharded.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        walk = StateWalk({"model": sharded, "optimizer": optimizer}, rank=rank, world_size=world)
        leaves = {leaf.path: leaf for leaf in walk.collect()[0].leaves()}
        names[rank] = set(leaves)
        weight, bias = leaves["model/0.weight"], leaves["model/2.bias"]
        moment, counter = leaves["optimizer/state/0.weight/exp_avg"], leaves["optimizer/state/0.weight/step"]
        assert weight.shape == ((2, 5) if rank < 2 else (1, 5))
        assert (weight.shape, weight.starts, weight.whole_shape) == (moment.shape, moment.starts, moment.whole_shape)
        assert bias.shape == ((1,) if rank == 0 else (0,))
        assert (counter.replicated, counter.per_rank) == (True, False)
        assert leaves["model/1.running_mean"].per_rank
    assert names[0] == names[1] == names[2]


def test_a_model_left_whole_by_an_evaluation_is_walked_by_its_shards(as_rank):
    as_rank(0, 1)
    sharded = model()
    walk = StateWalk({"model": sharded})
    before = walk.collect()[0]
    with torch.no_grad():
        sharded(torch.ones(2, 5))
    assert not isinstance(sharded[2].weight, DTensor)  # the root stays whole after a forward without a backward
    assert walk.collect()[0].section("model") == before.section("model")
    assert isinstance(sharded[2].weight, DTensor)


def test_a_shard_that_is_replaced_or_laid_out_anew_is_walked_anew(as_rank, keep):
    as_rank(0, 1)
    sharded = model()
    walk = StateWalk({"model": sharded})
    weight = sharded[0].weight
    mesh, spec = weight.device_mesh, weight._spec

    def new_local():
        weight._local_tensor = weight._local_tensor + 1

    def new_layout():
        other = DTensor.from_local(weight._local_tensor, mesh, [Replicate()], run_check=False)
        weight._spec = other._spec if weight._spec is spec else spec

    for change in (lambda: None, new_local, new_layout, new_layout):
        walk.collect()
        change()
        layout, parts = walk.collect()
        fresh = keep({"model": sharded})
        assert walk.encode(layout) == fresh.text
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(parts[0].sources, _sources(sharded), strict=True))


def _sources(module):
    return StateWalk({"model": module}).collect()[1][0].sources


def test_ddp_s_parameters_are_replicas_and_its_buffers_each_rank_s_own(as_rank):
    """BatchNorm's statistics differ from rank to rank between two forwards, whoever broadcasts them later."""
    as_rank(1, 2)
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    for parameter in wrapped.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    layout = StateWalk({"model": wrapped, "optimizer": optimizer}, rank=1, world_size=2).collect()[0]
    facts = {leaf.path: (leaf.replicated, leaf.per_rank) for leaf in layout.leaves()}
    assert facts["model/0.weight"] == facts["optimizer/state/0.weight/momentum_buffer"] == (True, False)
    assert facts["model/1.running_mean"] == facts["rng/torch"] == (False, True)
    assert set(layout.section("model").tree) == set(inner.state_dict())
