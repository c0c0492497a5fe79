"""Two ranks of FSDP2 save through Everstep; worlds of 1, 2 and 3 that never import it load with DCP, and Everstep's own
reader takes it up in worlds of 2 (DDP) and 3, to the same bits. Usage: script DIR.

One process imports torch and forks all ranks; it runs no tensor operation itself.
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")
WHERE = sys.argv[1]
STEP, SAVERS = 20, 2


def build(sharded, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(1000 + step)
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def everything(model, optimizer):
    state = {name: whole(value) for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        state |= {f"{names[parameter]}:{key}": whole(value) for key, value in kept.items()}
    return state


def join(rank, world, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{WHERE}/{name}", world), rank=rank, world_size=world)


def save(rank):
    join(rank, SAVERS, "save")
    from everstep.checkpoint.core.layout import Layout
    from everstep.checkpoint.fileops import PosixFiles
    from everstep.checkpoint.shards import Target, write_shard
    from everstep.checkpoint.walk import StateWalk

    model, optimizer = build(True, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 3)
    expected = everything(model, optimizer)
    walk = StateWalk({"model": model, "optimizer": optimizer, "scheduler": scheduler}, rank=rank, world_size=SAVERS)
    layout, parts = walk.collect()
    payload = bytearray(layout.payload_bytes)
    for part in parts:
        for leaf, source in zip([x for x in part.section.leaves if x.alias_of is None], part.sources, strict=True):
            content = source.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            payload[leaf.offset : leaf.offset + leaf.nbytes] = content
    description = walk.encode(layout)
    folder = f"{WHERE}/step-{STEP}.0.0.0123abcd-1.tmp"
    target = Target("s", STEP, 0, 0, SAVERS, folder)
    view = memoryview(payload)
    fragment = write_shard(PosixFiles(), target, Layout.from_json(description), description, view, {})
    with open(f"{WHERE}/fragment-{rank}", "wb") as file:
        file.write(fragment.to_bytes())
    if rank == 0:
        torch.save(expected, f"{WHERE}/expected.pt")
        torch.save(optimizer.param_groups[0]["lr"], f"{WHERE}/lr.pt")


def publish(_):
    from everstep.checkpoint.core.manifest import Fragment
    from everstep.checkpoint.dcp import metadata_bytes
    from everstep.checkpoint.fileops import PosixFiles
    from everstep.checkpoint.publish import publish

    parts = []
    for rank in range(SAVERS):
        with open(f"{WHERE}/fragment-{rank}", "rb") as file:
            parts.append(Fragment.from_bytes(file.read()))
    publish(PosixFiles(), WHERE, f"{WHERE}/step-{STEP}.0.0.0123abcd-1.tmp", parts, metadata_bytes)


def restore(rank):
    """Everstep's own reader, into a model that was built differently."""
    join(rank, SAVERS, "restore")
    from everstep.checkpoint.load import open_checkpoint
    from everstep.checkpoint.walk import StateWalk

    model, optimizer = build(True, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    walk = StateWalk({"model": model, "optimizer": optimizer, "scheduler": scheduler}, rank=rank, world_size=SAVERS)
    with open_checkpoint(f"{WHERE}/step-{STEP}", rank, SAVERS) as state:
        walk.restore(state.layout, state.bytes_of)
        walk.restore_generators(state.layout, state.bytes_of)
    compare(model, optimizer)


def reshard(rank, world, kind):
    """Everstep's own reader, in another world, or in one that is divided otherwise."""
    join(rank, world, f"reshard-{world}-{kind}")
    from everstep.checkpoint.load import open_for
    from everstep.checkpoint.walk import StateWalk

    model, optimizer = build(kind == "fsdp", 2)
    outer = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    train(outer, optimizer, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    walk = StateWalk({"model": outer, "optimizer": optimizer, "scheduler": scheduler}, rank=rank, world_size=world)
    with open_for(f"{WHERE}/step-{STEP}", walk) as state:
        state.prepare()
        walk.restore(state.layout, state.bytes_of, state.refused)
        walk.restore_generators(state.layout, state.bytes_of)
    compare(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == torch.load(f"{WHERE}/lr.pt")
    train(outer, optimizer, 1)  # and it trains on


def reshard_2_ddp(rank):
    reshard(rank, 2, "ddp")


def reshard_3(rank):
    reshard(rank, 3, "fsdp")


def compare(model, optimizer):
    expected, found = torch.load(f"{WHERE}/expected.pt"), everything(model, optimizer)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def load(rank, world, sharded):
    join(rank, world, f"load-{world}-{sharded}")
    model, optimizer = build(sharded, 3)
    train(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{WHERE}/step-{STEP}")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    compare(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == torch.load(f"{WHERE}/lr.pt")
    assert not [name for name in sys.modules if name.startswith("everstep")]


def load_1_plain(rank):
    load(rank, 1, False)


def load_1(rank):
    load(rank, 1, True)


def load_2(rank):
    load(rank, 2, True)


def load_3(rank):
    load(rank, 3, True)


if __name__ == "__main__":
    ranks(SAVERS, save)
    ranks(1, publish)
    ranks(SAVERS, restore)
    for count, function in ((1, load_1_plain), (1, load_1), (2, load_2), (3, load_3)):
        ranks(count, function)
    for count, function in ((2, reshard_2_ddp), (3, reshard_3)):
        ranks(count, function)
    print("all worlds agree")
