"""A checkpoint of one world, taken up by another: tensors, counters, generators and objects are as if it had saved it.

Ranks are built one after another over a process group that does not exist. Gradients are the parameters themselves, so
that a shard's training is the shard of the whole's training: what a rank of the other world must come to is built
there, from the same seed, and compared bit for bit. (With real ranks, beside `dcp.load`: tests/procs/checkpoint.)
"""

import argparse
import copy
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.checkpoint import commands
from everstep.checkpoint.core import names
from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.reshard import seed_of
from everstep.checkpoint.load import open_for
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.tensors import local_of
from everstep.checkpoint.walk import StateWalk
from everstep.data import GlobalSampler
from everstep.errors import ConfigurationError, DamagedCheckpoint, StateMismatch, UsageError
from everstep.inprocess import groups
from everstep.testing.disks import UnsyncedFiles

STEP = 7


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()
    for _, empty in groups.caches():
        empty()


@pytest.fixture(autouse=True)
def left():
    yield
    leave()


def become(rank, world):
    leave()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


class Extra(nn.Module):
    """A module with a state beside its tensors, a bf16 parameter, a scalar one, one without elements, a tied one."""

    def __init__(self):
        super().__init__()
        self.short = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.none = nn.Parameter(torch.randn(0, 3))
        self.row = nn.Parameter(torch.randn(1, 4))
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.extra = Extra()
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Box:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Mine:
    """A sampler whose position counts for its rank alone."""

    def __iter__(self):
        yield from range(10)

    def state_dict(self):
        return {"at": 4}

    def load_state_dict(self, state):
        raise AssertionError("must not be asked")


def build(kind, seed, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = Model()
    if kind == "fsdp":
        fully_shard(model.body[0])
        fully_shard(model.body)
        fully_shard(model)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    inner = model.module if kind == "ddp" else model
    opt = optimizer(model.parameters(), lr=0.1, **options)
    return {
        "model": model, "optimizer": opt, "scheduler": torch.optim.lr_scheduler.StepLR(opt, 3),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "box": Box([1, torch.arange(3), np.float32(2.5)]),
    }, inner  # fmt: skip


def train(state, inner, steps=2):
    for _ in range(steps):
        for parameter in inner.parameters():
            parameter.grad = parameter.detach().clone()
        state["optimizer"].step()
        state["scheduler"].step()
        inner.extra.seen += 1
        inner.counter += 1


def draw(rank):
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def save(directory, kind, world, change=lambda state, rank: None, **options):
    """Each rank in turn trains, and writes its part; the directory is published."""
    folder, parts = os.path.join(directory, str(names.Staging(STEP, 0, 0, "abcdef01", 1))), []
    for rank in range(world):
        become(rank, world)
        state, inner = build(kind, 1, **options)
        train(state, inner)
        state["box"].value[0] = 5
        change(state, rank)
        draw(rank)
        walk = StateWalk(state, rank=rank, world_size=world)
        layout, made = walk.collect()
        payload = bytearray(layout.payload_bytes)
        for part in made:
            for leaf, source in zip([x for x in part.section.leaves if x.alias_of is None], part.sources, strict=True):
                content = source.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.nbytes else b""
                payload[leaf.offset : leaf.offset + leaf.nbytes] = content
        text = walk.encode(layout)
        target = Target("s", STEP, 0, 0, world, folder)
        parts.append(write_shard(UnsyncedFiles(), target, Layout.from_json(text), text, memoryview(payload), {}))
    publish(UnsyncedFiles(), directory, folder, parts, lambda manifest: b"metadata")
    return os.path.join(directory, names.committed(STEP))


def taken_up(path, kind, rank, world, **options):
    become(rank, world)
    state, inner = build(kind, 2, **options)
    walk = StateWalk(state, rank=rank, world_size=world)
    with open_for(path, walk) as saved:
        size = saved.prepare()
        assert walk.restore(saved.layout, saved.bytes_of, saved.refused) <= size
        walk.restore_generators(saved.layout, saved.bytes_of)
    return state, inner


def tensors(state, inner):
    found = {
        name: local_of(value) for name, value in inner.state_dict(keep_vars=True).items() if "extra_state" not in name
    }
    known = {parameter: name for name, parameter in inner.named_parameters(remove_duplicate=False)}
    for parameter, entry in state["optimizer"].state.items():
        found |= {f"{known[parameter]}:{key}": local_of(value) for key, value in entry.items()}
        assert all(type(v) is type(parameter.data) or v.dim() == 0 for v in entry.values()), (
            "sharded as its parameter is"
        )
    return found


def same(kind, state, inner, **options):
    """What this rank holds is what it would hold had it been here from the start. Compared while it is this rank."""
    twin, twin_inner = build(kind, 1, **options)
    train(twin, twin_inner)
    expected, found = tensors(twin, twin_inner), tensors(state, inner)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape), name
        assert (
            value.contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(found[name].contiguous().reshape(-1).view(torch.uint8))
        ), name
    assert inner.head.weight is inner.embed.weight
    assert inner.extra.seen == twin_inner.extra.seen == 2
    assert state["scheduler"].state_dict() == twin["scheduler"].state_dict()
    assert state["optimizer"].param_groups[0]["lr"] == twin["optimizer"].param_groups[0]["lr"]
    assert state["scaler"].state_dict() == twin["scaler"].state_dict()
    assert state["box"].value[0] == 5


WAYS = [("fsdp", 4, "fsdp", 2), ("fsdp", 2, "fsdp", 4), ("fsdp", 3, "fsdp", 2), ("fsdp", 3, "ddp", 2),
        ("ddp", 2, "fsdp", 3), ("ddp", 2, "plain", 1)]  # fmt: skip
MORE = [("fsdp", 2, "fsdp", 3), ("ddp", 4, "ddp", 2), ("plain", 1, "fsdp", 3), ("fsdp", 4, "plain", 1),
        ("fsdp", 1, "fsdp", 3), ("fsdp", 5, "fsdp", 8), ("fsdp", 8, "ddp", 3)]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "world", "other", "size"), [*WAYS, *[pytest.param(*way, marks=pytest.mark.long) for way in MORE]]
)
def test_another_world_takes_it_up_to_the_bit(kind, world, other, size, tmp_path):
    path = save(str(tmp_path), kind, world)
    for rank in range(size):
        state, inner = taken_up(path, other, rank, size)
        drawn = (random.random(), np.random.rand(), torch.rand(1).item())
        if rank < world:
            draw(rank)
            assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
        same(other, state, inner)


def test_fsdp2_and_ddp_of_one_size_take_each_other_up(tmp_path):
    """The size did not change: the checkpoint is of this world, and yet its shards are not this model's."""
    for kind, other in (("fsdp", "ddp"), ("ddp", "fsdp")):
        path = save(str(tmp_path / kind), kind, 2) if (tmp_path / kind).mkdir() is None else ""
        for rank in range(2):
            state, inner = taken_up(path, other, rank, 2)
            same(other, state, inner)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        *[pytest.param(*kind, marks=pytest.mark.long) for kind in (
            (torch.optim.SGD, {}), (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adagrad, {}),
            (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}))],
    ],
)  # fmt: skip
def test_whatever_the_optimizer_keeps(optimizer, options, tmp_path):
    path = save(str(tmp_path), "fsdp", 3, optimizer=optimizer, **options)
    for rank in range(2):
        state, inner = taken_up(path, "fsdp", rank, 2, optimizer=optimizer, **options)
        same("fsdp", state, inner, optimizer=optimizer, **options)


def test_new_ranks_draw_from_seeds_of_their_own_in_every_attempt(tmp_path):
    path = save(str(tmp_path), "ddp", 2)
    drawn = {}
    for _ in range(2):
        for rank in range(4):
            taken_up(path, "ddp", rank, 4)
            drawn.setdefault(rank, []).append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert all(first == second for first, second in drawn.values())
    assert len({value for first, _ in drawn.values() for value in first}) == 12
    assert seed_of("rng/torch", "x", 2) != seed_of("rng/torch", "x", 3)


# What means nothing in another world.


def refusal(path, kind="fsdp", rank=0, world=2, **more):
    become(rank, world)
    state, inner = build(kind, 2)
    state |= more
    before = copy.deepcopy({name: value.detach().clone() for name, value in tensors(state, inner).items()})
    walk = StateWalk(state, rank=rank, world_size=world)
    with open_for(path, walk) as saved:
        saved.prepare()
        with pytest.raises(StateMismatch) as told:
            walk.restore(saved.layout, saved.bytes_of, saved.refused)
        after = tensors(state, inner)
        assert all(value.equal(after[name]) for name, value in before.items()), "untouched"
        partial = walk.restore_what_fits(saved.layout, saved.bytes_of, saved.refused)
    return str(told.value), partial, state, inner


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_an_optimizer_of_another_class_is_refused_in_another_world_too(kind, tmp_path):
    path = save(str(tmp_path), kind, 2, optimizer=torch.optim.Adam)
    told, partial, state, _ = refusal(path, kind, 1, 3)
    assert "optimizer/state was saved by an object of the class Adam, and this one is AdamW" in told
    assert any("of the class Adam" in text for text in partial.differing)
    assert not state["optimizer"].state


def test_what_differs_from_rank_to_rank_is_refused_by_its_name_and_the_rest_can_be_had(tmp_path):
    def change(state, rank):
        state["box"].value[0] = rank
        state["model"].counter += rank
        state["scheduler"].last_epoch += 0

    path = save(str(tmp_path), "fsdp", 3, change)
    told, partial, state, inner = refusal(path)
    assert "box/value/0 is 0 on rank 0 and 1 on rank 1: it belongs to each rank alone" in told
    assert "model/counter differs from rank to rank" in told
    assert len(partial.differing) == 2
    assert (partial.missing, partial.left_over) == ((), ())
    assert state["box"].value[0] == 1
    assert inner.counter == 0
    inner.counter += 2
    state["box"].value[0] = 5
    same("fsdp", state, inner)


def test_ddp_s_buffers_are_rank_0_s(tmp_path):
    """They differ after a step, and the next forward makes all of them rank 0's."""

    def change(state, rank):
        state["model"].module.counter += rank

    path = save(str(tmp_path), "ddp", 3, change)
    for kind, size in (("ddp", 2), ("plain", 1)):
        state, inner = taken_up(path, kind, size - 1, size)
        same(kind, state, inner)


def test_a_sampler_of_a_user_s_own_is_refused_by_its_name(tmp_path):
    path = save(str(tmp_path), "fsdp", 3, lambda state, rank: state.update(loader=Mine()))
    told, partial, _, _ = refusal(path, loader=Mine())
    assert "loader: the position of Mine in the data counts for each rank alone" in told
    assert "everstep.data.GlobalSampler" in told
    assert partial.differing == (told[told.index("loader: ") : told.index(". Give it")],)


def test_a_global_sampler_goes_on(tmp_path):
    def change(state, rank):
        state["loader"] = GlobalSampler(100, rank=rank, world_size=3)
        state["loader"].consumed = 42

    path = save(str(tmp_path), "fsdp", 3, change)
    become(1, 2)
    state, _ = build("fsdp", 2)
    state["loader"] = GlobalSampler(100, rank=1, world_size=2)
    walk = StateWalk(state, rank=1, world_size=2)
    with open_for(path, walk) as saved:
        walk.restore(saved.layout, saved.bytes_of, saved.refused)
    assert state["loader"].consumed == 42


# For others: `everstep checkpoint convert`.


def convert(directory, out, *more):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", "convert", str(directory), str(out), *more])
    return args.run(args)


def expected_state():
    become(0, 1)
    state, inner = build("plain", 1)
    train(state, inner)
    return state, inner


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 3), ("ddp", 2), ("fsdp", 1)])
def test_one_file_of_torch_save_loads_where_nobody_knows_us(kind, world, tmp_path, capsys):
    save(str(tmp_path / "kept"), kind, world) if (tmp_path / "kept").mkdir() is None else None
    assert convert(tmp_path / "kept", tmp_path / "model.pt", "--to", "torch", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["files"]) == (STEP, [str(tmp_path / "model.pt")])
    assert told["left_out"] == ["rng: random generators belong to each rank alone"]
    state, inner = expected_state()
    found = torch.load(tmp_path / "model.pt", weights_only=False)
    _, fresh_inner = build("plain", 3)
    fresh_inner.load_state_dict(found["model"])
    assert fresh_inner.extra.seen == 2
    names = [name for name, _ in fresh_inner.named_parameters()]
    for n, name in enumerate(names):
        known = state["optimizer"].state[dict(inner.named_parameters())[name]]
        assert found["optimizer"]["state"][name].keys() == known.keys(), n
        assert all(known[key].equal(value) for key, value in found["optimizer"]["state"][name].items())
    assert found["optimizer"]["param_groups"][0]["params"] == names
    assert found["scheduler"] == state["scheduler"].state_dict()
    truth = {name: value for name, value in inner.state_dict().items() if isinstance(value, torch.Tensor)}
    assert all(found["model"][name].equal(value) for name, value in truth.items())
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr(), "stored once"
    assert sorted(os.listdir(tmp_path)) == ["kept", "model.pt"]
    assert "rng" not in found


def test_safetensors_in_one_file_and_in_several_with_an_index(tmp_path, capsys, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    (tmp_path / "kept").mkdir()
    save(str(tmp_path / "kept"), "fsdp", 2)
    assert convert(tmp_path / "kept", tmp_path / "one", "--to", "safetensors", "--step", str(STEP)) == 0
    _, inner = expected_state()
    truth = {name: value for name, value in inner.state_dict().items() if "extra_state" not in name}
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    one = safetensors.load_file(tmp_path / "one" / "model.safetensors")
    assert one.keys() == truth.keys()
    assert all(value.equal(truth[name]) and value.dtype == truth[name].dtype for name, value in one.items())
    from everstep.checkpoint import convert as converting

    done = converting.convert(str(tmp_path / "kept" / "step-7"), "safetensors", str(tmp_path / "many"), shard_bytes=200)
    assert len(done.files) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        found[name] = safetensors.load_file(tmp_path / "many" / file)[name]
    assert all(value.equal(truth[name]) for name, value in found.items())
    assert found.keys() == truth.keys()
    count = len(done.files) - 1
    assert set(index["weight_map"].values()) == {
        f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
    }
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in truth.values())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'everstep\[safetensors\]'"):
        convert(tmp_path / "kept", tmp_path / "none", "--to", "safetensors")
    assert sorted(os.listdir(tmp_path)) == ["kept", "many", "one"], "nothing half is left"


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "kept").mkdir()
    path = save(str(tmp_path / "kept"), "ddp", 2)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UsageError, match="there exists; nothing is overwritten"):
        convert(tmp_path / "kept", tmp_path / "there", "--to", "torch")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(UsageError, match="has no checkpoint of step 8; it has: 7"):
        convert(tmp_path / "kept", tmp_path / "out", "--to", "torch", "--step", "8")
    with pytest.raises(UsageError, match="is no directory"):
        convert(tmp_path / "kept", tmp_path / "no" / "out", "--to", "torch")
    with pytest.raises(UsageError, match="has no 'teacher'; it has: model, optimizer"):
        convert(tmp_path / "kept", tmp_path / "out", "--to", "torch", "--only", "teacher")
    shard = Path(path) / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"is damaged and not converted: 7 __1_0.distcp has checksum"):
        convert(tmp_path / "kept", tmp_path / "out", "--to", "torch")
    assert sorted(os.listdir(tmp_path)) == ["kept", "there"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no checkpoint in"):
        convert(tmp_path / "empty", tmp_path / "out", "--to", "torch")


def test_a_buffer_that_differs_is_rank_0_s_and_it_is_said(tmp_path):
    def change(state, rank):
        state["model"].counter += rank
        state["box"].value[0] = rank

    (tmp_path / "kept").mkdir()
    path = save(str(tmp_path / "kept"), "fsdp", 2, change)
    from everstep.checkpoint import convert as converting

    done = converting.convert(path, "torch", str(tmp_path / "out.pt"))
    told = "model/counter differs from rank to rank (0 and 1, for example): it belongs to each rank alone"
    assert f"{told}; rank 0 has given it" in done.left_out
    assert any(text.startswith("box/value/0 is 0 on rank 0 and 1 on rank 1") for text in done.left_out)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert "box" not in found
    assert found["model"]["counter"].item() == 2
