"""Plain values, foreign objects, generators and sharded tensors as state: taken, refused by key, restored in place."""

import datetime
import enum
import pathlib
import random
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.checkpoint.core import items
from everstep.checkpoint.core.layout import Pieces
from everstep.checkpoint.walk import StateWalk
from everstep.errors import StateMismatch
from everstep.testing.kept import Kept
from everstep.testing.same import differs


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Settings:
    rate: float
    name: str
    weight: torch.Tensor


Point = namedtuple("Point", "x y")


class Box:
    def __init__(self, value=None) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Stubborn:
    def __reduce__(self):
        raise ValueError("no")


OBJECTS = {
    "enum": Color.RED,
    "int enum": Level.LOW,
    "dataclass": Settings(0.5, "a", torch.ones(2)),
    "named tuple": Point(1, 2),
    "default dict": defaultdict(int, a=1),
    "path": pathlib.PurePosixPath("/a/b"),
    "date": datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC),
    "range": range(3),
    "sparse": torch.ones(2).to_sparse(),
    "records": np.zeros(1, [("a", int)]),
    "set of enums": {Color.RED},
    "keys of enums": {Color.RED: torch.ones(1)},
    "device": torch.device("cpu"),
    "dtype": torch.float32,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_any_other_object_is_refused_by_its_key_or_pickled_if_both_sides_say_so(name, tmp_path):
    value = OBJECTS[name]
    state = {"box": Box([{"it": value, "w": torch.arange(3)}])}
    with pytest.raises(TypeError, match=r"^box/value/0/it"):
        Kept(StateWalk(state))
    kept = Kept(StateWalk(state, allow_pickle=True))
    back = Box(before := [1])
    with pytest.raises(StateMismatch, match=r"box/value/0/it.* was saved with allow_pickle=True"):
        kept.restore(StateWalk({"box": back}))
    assert back.value is before
    kept.restore(StateWalk({"box": back}, allow_pickle=True))
    check = (lambda a, b: a.to_dense().equal(b.to_dense())) if name == "sparse" else lambda a, b: not differs(a, b)
    assert check(value, back.value[0]["it"])
    assert back.value[0]["w"].equal(torch.arange(3))
    kept.restore_from_disk(StateWalk({"box": back}, allow_pickle=True), str(tmp_path))
    assert check(value, back.value[0]["it"])


def test_what_pickle_refuses_is_refused_by_its_key_at_the_save():
    for value in (Stubborn(), lambda: 0):
        with pytest.raises(TypeError, match=r"box/value/0 is a .*, but pickle refused it"):
            Kept(StateWalk({"box": Box([value])}, allow_pickle=True))


def test_an_object_whose_class_is_gone_is_named(monkeypatch):
    kept = Kept(StateWalk({"box": Box([Settings(1.0, "a", torch.ones(1))])}, allow_pickle=True))
    monkeypatch.delitem(globals(), "Settings")
    with pytest.raises(StateMismatch, match=r"box/value/0 was pickled .* cannot be made again: AttributeError"):
        kept.restore(StateWalk({"box": Box()}, allow_pickle=True))


def test_without_leave_nothing_is_unpickled_even_where_nobody_looks(monkeypatch):
    kept = Kept(StateWalk({"box": Box(Color.RED)}, allow_pickle=True))
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("unpickled"))
    with pytest.raises(StateMismatch, match="if you trust whoever wrote it"):
        kept.restore(StateWalk({"box": Box()}))


def test_what_contains_itself_is_refused_by_its_key():
    loop: list = [torch.ones(1)]
    loop.append(loop)
    for allow in (False, True):
        with pytest.raises(TypeError, match=r"box/value/1/1/1.*nested deeper than 100 levels, or contains itself"):
            Kept(StateWalk({"box": Box(loop)}, allow_pickle=allow))


def test_tensors_and_values_are_taken_up_in_place():
    weight, moved = torch.ones(3), nn.Parameter(torch.zeros(2, 2))
    inner = {"m": moved, "history": [1.0, 2.0]}
    state = {"w": weight, "epoch": 3, "deep": inner, "pair": (torch.ones(1), "a")}
    kept = Kept(StateWalk(state, values=True))
    pair = state["pair"]
    weight.zero_()
    with torch.no_grad():
        moved.fill_(7)
    inner["history"].append(3.0)
    inner["later"] = "gone after the restore"
    state["epoch"] = 9
    kept.restore(StateWalk(state, values=True))
    assert state["w"] is weight
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert state["deep"] is inner
    assert inner["m"] is moved
    assert moved.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert inner == {"m": moved, "history": [1.0, 2.0]}
    assert state["epoch"] == 3
    assert state["pair"][0] is pair[0]


def test_an_empty_place_takes_whatever_was_saved():
    tree = {"w": torch.ones(2), "n": [1, {"x": torch.zeros(1)}]}
    kept = Kept(StateWalk({"state": tree, "best": 1.5}, values=True))
    back = {"state": {}, "best": None}
    kept.restore(StateWalk(back, values=True))
    assert differs(tree, back["state"]) == ""
    assert back["best"] == 1.5


WRONG = {
    "a shape": (lambda s: s.update(w=torch.ones(4)), r"state/w was saved as float32\[3\] and is float32\[4\]"),
    "a dtype": (lambda s: s.update(w=torch.ones(3).long()), r"state/w was saved as float32\[3\] and is int64\[3\]"),
    "one more": (lambda s: s.update(v=torch.ones(1)), "state/v is missing in the saved state"),
    "one less": (lambda s: s.pop("w"), "state/w was saved and is not here"),
    "another kind": (lambda s: s.update(n=torch.ones(1)), "state/n is a Tensor and was saved as something else"),
    "a tensor in a list": (lambda s: s["l"].__setitem__(0, torch.ones(9)), r"state/l/0 was saved as"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit_are_named_before_anything_is_written(name):
    def build():
        return {"w": torch.ones(3), "n": 1, "l": [torch.ones(2)], "z": torch.ones(2)}

    kept = Kept(StateWalk({"state": build()}, values=True))
    live = build()
    live["z"].zero_()
    change, told = WRONG[name]
    change(live)
    with pytest.raises(StateMismatch, match=told):
        kept.restore(StateWalk({"state": live}, values=True))
    assert live["z"].tolist() == [0.0, 0.0]


def test_values_beside_a_model_and_only_where_they_are_asked_for():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="has no state_dict"):
        StateWalk({"model": model, "epoch": 1})
    state = {"model": model, "epoch": 1}
    kept = Kept(StateWalk(state, values=True))
    state["epoch"] = 5
    kept.restore(StateWalk(state, values=True))
    assert state["epoch"] == 1
    with pytest.raises(TypeError, match="this name is taken"):
        StateWalk({"ranks": Box()})


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(4), lambda g: torch.rand((), generator=g).item()),
    "python": (lambda: random.Random(4), lambda g: (g.random(), g.gauss(0, 1))),
    "numpy legacy": (lambda: np.random.RandomState(4), lambda g: (g.random(), g.standard_normal())),
    "numpy": (lambda: np.random.default_rng(4), lambda g: (g.random(), g.standard_normal(dtype=np.float32))),
    "numpy MT19937": (lambda: np.random.Generator(np.random.MT19937(4)), lambda g: g.random()),
    "numpy Philox": (lambda: np.random.Generator(np.random.Philox(4)), lambda g: g.random()),
    "numpy SFC64": (lambda: np.random.Generator(np.random.SFC64(4)), lambda g: g.random()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_one_s_own_draws_on_where_it_was(name, tmp_path):
    make, draw = GENERATORS[name]
    own = make()
    draw(own)
    kept = Kept(StateWalk({"own": own}))
    expected = [draw(own) for _ in range(4)]
    kept.restore(StateWalk({"own": own}))
    assert [draw(own) for _ in range(4)] == expected
    other = make()
    kept.restore_from_disk(StateWalk({"own": other}), str(tmp_path))
    assert [draw(other) for _ in range(4)] == expected


def test_a_generator_of_another_kind_does_not_take_the_state():
    kept = Kept(StateWalk({"own": np.random.default_rng(1)}))
    with pytest.raises(StateMismatch, match="own was saved as the state of numpy PCG64 and is numpy Philox"):
        kept.restore(StateWalk({"own": np.random.Generator(np.random.Philox(1))}))
    with pytest.raises(TypeError, match="has no state_dict"):
        StateWalk({"own": random.SystemRandom()})


def test_keys_that_make_one_name_on_disk_stay_apart(tmp_path):
    """Keys 1 and "1", a dot in a key, what looks like a rank's: a save that failed at its commit, each time."""
    odd = {1: torch.ones(1), "1": torch.zeros(1), "a.b": 1, "a": {"b": 2, "c": torch.ones(2)}, "a.c": torch.zeros(2),
           "..": 3, ".": torch.full((1,), 4.0), "/": 5, "\ud800": torch.ones(1), "": 6, "value": {"": 7}}  # fmt: skip
    kept = Kept(StateWalk({"box": Box(odd)}))
    names = [item.name for item in (*items.tensors(kept.layout), *items.values(kept.layout))]
    assert len(names) == len(set(names))
    back = Box()
    kept.restore_from_disk(StateWalk({"box": back}), str(tmp_path))
    assert differs(odd, back.value) == ""


def sharded(rank: int, world: int, rows=(2, 3, 1), fill=None):
    """Uneven shards of one matrix, as FSDP1's sharded state dicts and embedding tables hold them."""
    begins = [sum(rows[:n]) for n in range(len(rows))]
    every = [ShardMetadata([b, 0], [n, 4], f"rank:{r}/cpu") for r, (b, n) in enumerate(zip(begins, rows, strict=True))]
    whole = torch.arange(sum(rows) * 4.0).view(-1, 4) if fill is None else torch.full((sum(rows), 4), fill)
    local = whole[begins[rank] : begins[rank] + rows[rank]].clone()
    told = sharded_tensor.ShardedTensorMetadata(
        every, torch.Size((sum(rows), 4)), sharded_tensor.TensorProperties(dtype=torch.float32)
    )
    made = sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata
    return made([sharded_tensor.Shard(local, every[rank])], told)


@pytest.mark.parametrize("rank", range(3))
def test_a_sharded_tensor_comes_back_as_one(rank, as_rank):
    as_rank(rank, 3)
    state = {"box": Box({"table": sharded(rank, 3)})}
    kept = Kept(StateWalk(state, rank=rank, world_size=3))
    node = kept.layout.section("box").tree["value"]["table"]
    assert isinstance(node, Pieces)
    (leaf,) = [kept.layout.section("box").leaves[n] for n in node.leaves]
    assert (leaf.starts, leaf.shape, leaf.whole_shape) == (((0, 2, 5)[rank], 0), ((2, 3, 1)[rank], 4), (6, 4))
    assert [i.name for i in items.tensors(kept.layout) if i.leaf is leaf] == ["box.value.table"]
    back = Box()
    kept.restore(StateWalk({"box": back}, rank=rank, world_size=3))
    found = back.value["table"]
    assert type(found) is sharded_tensor.ShardedTensor
    assert found.metadata() == sharded(rank, 3).metadata()
    assert found.local_shards()[0].tensor.equal(sharded(rank, 3).local_shards()[0].tensor)
    live = sharded(rank, 3, fill=-1.0)
    values = {"table": live}
    taken = Kept(StateWalk({"table": sharded(rank, 3)}, rank=rank, world_size=3, values=True))
    taken.restore(StateWalk(values, rank=rank, world_size=3, values=True))
    assert values["table"] is live
    assert live.local_shards()[0].tensor.equal(sharded(rank, 3).local_shards()[0].tensor)
    with pytest.raises(StateMismatch, match="table was saved as shards"):
        taken.restore(StateWalk({"table": sharded(rank, 3, rows=(1, 3, 2))}, rank=rank, world_size=3, values=True))


def test_a_shard_that_is_not_as_its_metadata_says_is_refused(as_rank):
    as_rank(0, 3)
    value = sharded(0, 3)
    value.local_shards()[0].tensor = torch.zeros(3, 4)  # padded
    with pytest.raises(TypeError, match=r"box/value: a shard of this ShardedTensor has the shape \(3, 4\)"):
        Kept(StateWalk({"box": Box(value)}, world_size=3))


def test_a_dtensor_of_an_object_comes_back_as_one_or_not_at_all(as_rank):
    """Its local part under its name would be taken for the whole: a wrong state without a word."""
    as_rank(1, 2)
    mesh = init_device_mesh("cpu", (2,))

    def spread(fill=0.0):
        return DTensor.from_local(torch.full((2, 3), fill), mesh, [Shard(0)], run_check=False)

    kept = Kept(StateWalk({"ema": Box({"w": spread(5.0)})}, rank=1, world_size=2))
    live = Box({"w": spread()})
    kept.restore(StateWalk({"ema": live}, rank=1, world_size=2))
    assert isinstance(live.value["w"], DTensor)
    assert live.value["w"].shape == (4, 3)
    assert live.value["w"].to_local().eq(5.0).all()
    with pytest.raises(StateMismatch, match=r"ema/value/w was saved as a DTensor of shape \[4, 3\]"):
        kept.restore(StateWalk({"ema": Box()}, rank=1, world_size=2))
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(spread())
    lent = Box()
    both = {"ema": Box({"w": spread(5.0)}), "model": model}
    kept = Kept(StateWalk(both, rank=1, world_size=2))
    kept.restore(StateWalk({"ema": lent, "model": model}, rank=1, world_size=2))
    assert lent.value["w"].to_local().eq(5.0).all()


LAYOUTS = {
    "10x3 over 4": ((10, 3), (4,), [Shard(0)]),
    "3x3 over 4": ((3, 3), (4,), [Shard(0)]),
    "columns": ((3, 10), (4,), [Shard(1)]),
    "2x2": ((5, 7), (2, 2), [Shard(0), Shard(1)]),
    "2x2, one dimension twice": ((9, 2), (2, 2), [Shard(0), Shard(0)]),
    "replicate and shard": ((5, 4), (2, 2), [Replicate(), Shard(0)]),
    "shard and replicate": ((5, 4), (2, 2), [Shard(1), Replicate()]),
    "strided": ((8, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_dtensors_tiles_the_whole_or_is_refused(name, as_rank):
    """CS-23: held against the pieces that torch itself deals out."""
    shape, mesh_shape, placements = LAYOUTS[name]
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    found = torch.full(shape, torch.nan)
    for rank in range(4):
        as_rank(rank, 4)
        value = distribute_tensor(whole, init_device_mesh("cpu", mesh_shape), placements, src_data_rank=None)
        kept = Kept(StateWalk({"box": Box(value)}, rank=rank, world_size=4))
        leaf = kept.layout.section("box").leaves[0]
        place = tuple(slice(o, o + s) for o, s in zip(leaf.starts, leaf.shape, strict=True))
        assert whole[place].equal(value.to_local())
        found[place] = value.to_local()
    assert found.equal(whole)


@pytest.mark.parametrize("rows", [5, 6, 7, 9, 10, 12])
def test_strided_shards_that_lie_in_several_pieces_are_refused(rows, as_rank):
    """FSDP2 over tensor parallelism, on sizes that the mesh does not divide: either the very rows, or a refusal."""
    whole = torch.arange(rows * 2.0).view(rows, 2)
    refused = 0
    for rank in range(4):
        as_rank(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        value = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Shard(0)], src_data_rank=None)
        try:
            kept = Kept(StateWalk({"box": Box(value)}, rank=rank, world_size=4))
        except TypeError:
            refused += 1
            continue
        leaf = kept.layout.section("box").leaves[0]
        assert whole[leaf.starts[0] : leaf.starts[0] + leaf.shape[0]].equal(value.to_local())
    assert refused == 0 or rows % 4


def test_uneven_pieces_put_together_by_hand_are_refused(as_rank):
    for rank, rows in enumerate((1, 3)):
        as_rank(rank, 2)
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(torch.ones(rows, 2), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
        with pytest.raises(TypeError, match=r"box/value: this rank's shard has the shape .* Such a layout"):
            Kept(StateWalk({"box": Box(value)}, rank=rank, world_size=2))


def test_a_shard_that_one_rank_holds_whole_keeps_the_name_of_all(as_rank):
    """A bias of one element under FSDP2: rank 0 holds all, the others nothing, under one name."""
    for rank in range(2):
        as_rank(rank, 2)
        local = torch.ones(1 - rank)
        value = DTensor.from_local(
            local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False, shape=(1,), stride=(1,)
        )
        layout = StateWalk({"box": Box(value)}, rank=rank, world_size=2).collect()[0]
        assert "box.value" in {item.name for item in items.tensors(layout)}


def test_containers_keep_their_type_and_order(tmp_path):
    value = OrderedDict([("b", 1), ("a", [torch.ones(1)])])
    back = Box()
    Kept(StateWalk({"box": Box(value)})).restore_from_disk(StateWalk({"box": back}), str(tmp_path))
    assert differs(value, back.value) == ""
