"""FSDP1 saves through Everstep, without a state dict of its own; FSDP1 goes on to the bit, DCP loads it anywhere.

Usage: script DIR RANKS STRATEGY flat|original. One process imports torch and forks all ranks; it runs no tensor
operation itself.
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

warnings.filterwarnings("ignore")
WHERE, RANKS, STRATEGY, KIND = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
STEP = 20


def plain(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5), nn.Dropout(0.1), nn.Linear(5, 7, bias=False)
    )


def build(seed):
    how = {"device_id": torch.device("cpu"), "use_orig_params": KIND == "original",
           "sharding_strategy": ShardingStrategy[STRATEGY]}  # fmt: skip
    model = plain(seed)
    model[2] = FullyShardedDataParallel(model[2], **how)
    model = FullyShardedDataParallel(model, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(1000 + step)
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def join(rank, world, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{WHERE}/{name}", world), rank=rank, world_size=world)


def walk_of(model, optimizer, rank):
    from everstep.checkpoint.walk import StateWalk

    return StateWalk({"model": model, "optimizer": optimizer}, rank=rank, world_size=RANKS)


def save(rank):
    join(rank, RANKS, "save")
    from everstep.checkpoint.fileops import PosixFiles
    from everstep.checkpoint.shards import Target, write_shard
    from everstep.testing.kept import Kept

    model, optimizer = build(1)
    train(model, optimizer, 3)
    torch.save(raw(model, optimizer), f"{WHERE}/raw-{rank}.pt")
    with torch.no_grad():
        model(torch.ones(1, 5))  # an evaluation that leaves some parameters unsharded
    kept = Kept(walk_of(model, optimizer, rank))
    target = Target("s", STEP, 0, 0, RANKS, f"{WHERE}/step-{STEP}.0.0.0123abcd-1.tmp")
    fragment = write_shard(PosixFiles(), target, kept.layout, kept.text, memoryview(kept.bytes), {})
    with open(f"{WHERE}/fragment-{rank}", "wb") as file:
        file.write(fragment.to_bytes())
    torch.save(train(model, optimizer, 3, first=3), f"{WHERE}/losses-{rank}.pt")


def publish(_):
    from everstep.checkpoint.core.manifest import Fragment
    from everstep.checkpoint.dcp import metadata_bytes
    from everstep.checkpoint.fileops import PosixFiles
    from everstep.checkpoint.publish import publish

    parts = []
    for rank in range(RANKS):
        with open(f"{WHERE}/fragment-{rank}", "rb") as file:
            parts.append(Fragment.from_bytes(file.read()))
    publish(PosixFiles(), WHERE, f"{WHERE}/step-{STEP}.0.0.0123abcd-1.tmp", parts, metadata_bytes)


def go_on(rank):
    """Another model, trained and left unsharded, takes the state up and does what the first one did."""
    join(rank, RANKS, "go_on")
    from everstep.checkpoint.load import open_checkpoint

    model, optimizer = build(2)
    train(model, optimizer, 1)
    with torch.no_grad():
        model(torch.ones(1, 5))
    walk = walk_of(model, optimizer, rank)
    with open_checkpoint(f"{WHERE}/step-{STEP}", rank, RANKS) as state:
        walk.restore(state.layout, state.bytes_of)
        walk.restore_generators(state.layout, state.bytes_of)
    assert train(model, optimizer, 3, first=3) == torch.load(f"{WHERE}/losses-{rank}.pt")


OTHER = RANKS - 1 if RANKS > 2 else RANKS + 1


def in_another_world(rank):
    """Another number of ranks takes it up: every parameter is what it was, and training goes on as it did.

    All ranks have the same data, so the losses are those of the first world but for the rounding of its means.
    """
    join(rank, OTHER, "another_world")
    from everstep.checkpoint.load import open_for
    from everstep.checkpoint.walk import StateWalk

    model, optimizer = build(2)
    train(model, optimizer, 1)
    walk = StateWalk({"model": model, "optimizer": optimizer}, rank=rank, world_size=OTHER)
    with open_for(f"{WHERE}/step-{STEP}", walk) as state:
        state.prepare()
        walk.restore(state.layout, state.bytes_of, state.refused)
    whole = told()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, value in model.named_parameters():
            assert torch.equal(value, whole[clean(name), ""]), name
    found = [float.fromhex(loss) for loss in train(model, optimizer, 3, first=3)]
    expected = [float.fromhex(loss) for loss in torch.load(f"{WHERE}/losses-0.pt")]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def raw(model, optimizer):
    """What this rank holds, as rows of elements: {names of parameters that lie in it: {kind: row}}."""
    held = {}
    if KIND == "original":
        rows = {(clean(name),): p for name, p in model.named_parameters()}
    else:
        handles = [(name, m._handle) for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
        rows = {tuple(clean(f"{name}.{fqn}") for fqn in h.flat_param._fqns): h.flat_param for name, h in handles}
    for names, parameter in rows.items():
        beside = {k: v for k, v in optimizer.state.get(parameter, {}).items() if v.dim()}
        held[names] = {kind: row.detach().flatten() for kind, row in {"": parameter, **beside}.items()}
    return held


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").lstrip(".")


def told():
    """The whole state, put together from the ranks' rows: those of one parameter one behind the other."""
    shapes = {name: p.shape for name, p in plain(0).named_parameters()}
    parts = [torch.load(f"{WHERE}/raw-{rank}.pt") for rank in range(RANKS)]
    parts = parts[:1] if STRATEGY == "NO_SHARD" else parts
    whole = {}
    for names in parts[0]:
        for kind in {kind for part in parts for kind in part[names]}:
            row = torch.cat([part[names].get(kind, torch.empty(0)) for part in parts])
            for name in names:
                count = shapes[name].numel()
                whole[name, kind], row = row[:count].view(shapes[name]), row[count:]
    return whole


def by_hand(rank):
    """A user's own way: FSDP1's local and sharded state dicts as plain values. They hold ShardedTensors."""
    join(rank, RANKS, "by_hand")
    from torch.distributed.fsdp import StateDictType

    from everstep.checkpoint.walk import StateWalk
    from everstep.testing.kept import Kept

    local = [StateDictType.LOCAL_STATE_DICT] * (KIND == "flat")  # torch itself loads it there alone
    for kind in (StateDictType.SHARDED_STATE_DICT, *local):
        model, optimizer = build(1)
        train(model, optimizer, 1)
        with FullyShardedDataParallel.state_dict_type(model, kind):
            kept = Kept(StateWalk({"model": model.state_dict()}, rank=rank, world_size=RANKS, values=True))
        expected = raw(model, optimizer)
        back = {"model": {}}
        other, fresh = build(2)
        kept.restore(StateWalk(back, rank=rank, world_size=RANKS, values=True))
        with FullyShardedDataParallel.state_dict_type(other, kind):
            other.load_state_dict(back["model"])
        for names, rows in raw(other, fresh).items():
            assert torch.equal(rows[""], expected[names][""]), (kind, names)


def load_with_dcp(_):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    join(0, 1, "load")
    model = plain(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    for value in [*state["model"].values(), *(v for e in state["optimizer"]["state"].values() for v in e.values())]:
        if value.dim():
            value.detach().fill_(torch.nan)
    dcp.load(state, checkpoint_id=f"{WHERE}/step-{STEP}")
    whole = told()
    assert {name for name, _ in whole} == state["model"].keys()
    for (name, kind), value in whole.items():
        found = state["model"][name] if kind == "" else state["optimizer"]["state"][name][kind]
        assert torch.equal(value, found), (name, kind)
    assert all(entry["step"].item() == 3 for entry in state["optimizer"]["state"].values())
    assert not [name for name in sys.modules if name.startswith("everstep")]


if __name__ == "__main__":
    for count, function in (
        (RANKS, save),
        (1, publish),
        (RANKS, go_on),
        (RANKS, by_hand),
        (1, load_with_dcp),
        (OTHER, in_another_world),
    ):
        ranks(count, function)
    print("all agree")
