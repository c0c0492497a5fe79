"""FSDP1's ranges and ShardedTensors in another world, or divided otherwise: what a rank comes to is what it would hold.

As in test_other_worlds.py: ranks one after another over a group that does not exist, gradients that are the parameters.
"""

import itertools
import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from everstep.checkpoint.core import names
from everstep.checkpoint.core.layout import Layout, printed
from everstep.checkpoint.load import open_for
from everstep.checkpoint.publish import publish
from everstep.checkpoint.sharded import sharded_tensor, shards_of
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.walk import StateWalk
from everstep.errors import StateMismatch
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.kept import Kept

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 warns of the CPU, of NO_SHARD and of itself
STEP = 7


def plain(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 5, 3), nn.LayerNorm(7), nn.Linear(5, 7))
    if kind != "fsdp2":  # which takes no other order than the dimensions'
        model[1].to(memory_format=torch.channels_last)
    model.scale = nn.Parameter(torch.randn(1))
    return model


def build(kind, seed):
    model = plain(kind, seed)
    if kind.startswith("fsdp1"):
        how = {"device_id": torch.device("cpu"), "use_orig_params": "orig" in kind}
        if "whole" in kind:
            how["sharding_strategy"] = ShardingStrategy.NO_SHARD
        model[3] = FullyShardedDataParallel(model[3], **how)
        model = FullyShardedDataParallel(model, **how)
    elif kind == "fsdp2":
        fully_shard(model[3])
        fully_shard(model)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state, steps=2):
    for _ in range(steps):
        for parameter in state["model"].parameters():
            parameter.grad = parameter.detach().clone() if parameter.numel() else None
        state["optimizer"].step()


def save(directory, world, as_rank, make):
    """Each rank in turn writes its part of what `make(rank)` returns; the directory is published."""
    folder, parts = os.path.join(directory, str(names.Staging(STEP, 0, 0, "abcdef01", 1))), []
    for rank in range(world):
        as_rank(rank, world)
        kept = Kept(StateWalk(make(rank), rank=rank, world_size=world, values=True))
        target = Target("s", STEP, 0, 0, world, folder)
        layout = Layout.from_json(kept.text)
        parts.append(write_shard(UnsyncedFiles(), target, layout, kept.text, memoryview(kept.bytes), {}))
    publish(UnsyncedFiles(), directory, folder, parts, lambda manifest: b"metadata")
    return os.path.join(directory, names.committed(STEP))


def taken_up(path, state, rank, world):
    walk = StateWalk(state, rank=rank, world_size=world, values=True)
    with open_for(path, walk) as saved:
        saved.prepare()
        walk.restore(saved.layout, saved.bytes_of, saved.refused)
    return state


def held(state, rank, world):
    """All that this rank holds, to the bit: trees, places and bytes."""
    layout, parts = StateWalk(state, rank=rank, world_size=world).collect()
    found = {}
    for section in layout.sections:
        if section.name != "rng":
            found[section.name] = printed(section.tree), [(x.path, x.dtype, x.shape, x.starts) for x in section.leaves]
    content = [bytes(s.contiguous().reshape(-1).view(torch.uint8).numpy()) for p in parts[:2] for s in p.sources]
    return found, content


WAYS = [
    ("fsdp1 flat", 4, "fsdp1 flat", 2), ("fsdp1 orig", 2, "fsdp1 orig", 4), ("fsdp1 orig", 3, "fsdp1 flat", 2),
    ("fsdp1 orig", 3, "fsdp2", 2), ("fsdp2", 2, "fsdp1 orig", 3), ("fsdp1 flat", 2, "ddp", 3),
    ("ddp", 2, "fsdp1 flat", 2), ("fsdp1 orig", 2, "fsdp2", 2), ("fsdp1 whole", 2, "fsdp1 orig", 3),
]  # fmt: skip
MORE = [
    ("fsdp1 orig", 4, "fsdp1 orig", 2), ("fsdp1 flat", 2, "fsdp1 flat", 4), ("fsdp1 flat", 3, "fsdp1 orig", 2),
    ("fsdp1 flat", 3, "fsdp2", 2), ("fsdp2", 3, "fsdp1 flat", 2), ("ddp", 3, "fsdp1 orig", 2),
    ("fsdp1 orig", 4, "ddp", 1), ("fsdp1 orig", 8, "fsdp1 flat", 5), ("fsdp2", 2, "fsdp1 flat", 2),
    ("fsdp1 flat", 3, "fsdp1 orig", 3), ("fsdp1 orig", 2, "fsdp1 whole", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "world", "other", "size"), [*WAYS, *[pytest.param(*way, marks=pytest.mark.long) for way in MORE]]
)
def test_another_world_or_another_division_takes_it_up_to_the_bit(kind, world, other, size, tmp_path, as_rank):
    """FSDP1 4→2, 2→4, 3→2, FSDP1↔FSDP2↔DDP: parameters and the optimizer's state, and where each lies."""

    def trained(kind):
        state = build(kind, 1)
        train(state)
        return state

    path = save(str(tmp_path), world, as_rank, lambda rank: trained(kind))
    for rank in range(size):
        as_rank(rank, size)
        state = taken_up(path, build(other, 2), rank, size)
        assert held(state, rank, size) == held(trained(other), rank, size)


def test_what_differs_from_rank_to_rank_beside_the_ranges_is_refused_by_its_name(tmp_path, as_rank):
    def make(rank):
        state = build("fsdp1 orig", 1)
        state["model"].register_buffer("seen", torch.tensor(float(rank)))
        return state

    path = save(str(tmp_path), 3, as_rank, make)
    as_rank(0, 2)
    other = make(0)
    before = held(other, 0, 2)
    with pytest.raises(StateMismatch, match=r"model/seen differs from rank to rank"):
        taken_up(path, other, 0, 2)
    assert held(other, 0, 2) == before


def sharded(rank, world, k, rows=6):
    """A ShardedTensor of `rows` rows, two shards a rank where they are enough, none of them empty."""
    bounds = [min(rows, -(-rows * n // (2 * world))) for n in range(2 * world + 1)]
    shards = [(n, ends) for n, ends in enumerate(itertools.pairwise(bounds)) if ends[0] < ends[1]]
    places = [[[a, 0], [b - a, 3], f"rank:{n // 2}/cpu"] for n, (a, b) in shards]
    whole = torch.arange(3.0 * rows).view(rows, 3) + k
    spec = {"class": "ShardedTensor", "shards": places, "requires_grad": False, "pin_memory": False}
    mine = [((a, 0), whole[a:b].clone()) for n, (a, b) in shards if n // 2 == rank]
    return sharded_tensor(spec, (rows, 3), torch.float32, mine)


@pytest.mark.parametrize(("world", "size"), [(3, 2), (2, 4), (4, 2), (2, 1)])
def test_a_sharded_tensor_is_taken_up_in_place_by_another_world(world, size, tmp_path, as_rank):
    path = save(str(tmp_path), world, as_rank, lambda rank: {"table": {"rows": sharded(rank, world, 5.0), "n": 3}})
    for rank in range(size):
        as_rank(rank, size)
        live = sharded(rank, size, 0.0)
        state = taken_up(path, {"table": {"rows": live, "n": 0}}, rank, size)
        assert state["table"]["rows"] is live
        assert state["table"]["n"] == 3
        expected = shards_of(sharded(rank, size, 5.0), "")
        assert [(at, t.tolist()) for at, t in shards_of(live, "")] == [(at, t.tolist()) for at, t in expected]
