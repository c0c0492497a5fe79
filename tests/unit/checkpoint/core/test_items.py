"""Names and owners: computed alike by every rank, DCP's names for what others read."""

from collections import deque

import pytest

from everstep.checkpoint.core import items
from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section, place
from everstep.errors import CheckpointError
from everstep.testing.states import rank_state


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_replica_has_one_owner_on_whom_all_ranks_agree(world):
    told = [
        {i.name: i.owner for i in items.tensors(rank_state(r, world, 5).layout) if i.replicated} for r in range(world)
    ]
    assert all(one == told[0] for one in told)
    assert set(told[0].values()) <= set(range(world))


def test_replicas_are_balanced_by_bytes():
    sizes = [100, 90, 50, 40, 30, 20, 10, 10]
    leaves, _ = place(Leaf(f"model/{n}", "uint8", (size,), size, replicated=True) for n, size in enumerate(sizes))
    layout = Layout(0, 2, (Section("model", {str(n): Ref(n) for n in range(len(sizes))}, leaves),))
    load = [0, 0]
    for item in items.tensors(layout):
        load[item.owner] += item.leaf.nbytes
    assert abs(load[0] - load[1]) <= 10


def test_names_are_dcps_and_what_is_a_ranks_own_says_whose():
    layout = rank_state(1, 2, 5).layout
    names = {item.name: item for item in items.tensors(layout)}
    assert set(names) == {"model.weight", "model.bias", "model.tied", "ranks.1.model.seen", "model.none"}
    assert names["model.weight"].offsets == (4, 0)
    assert names["model.weight"].shape == (8, 8)
    assert names["model.tied"].owner == names["model.bias"].owner
    values = {item.name: item.owner for item in items.values(layout)}
    assert values["optimizer.param_groups.0.lr"] == 0
    assert values["ranks.1.rng.python"] == 1


def test_in_a_world_of_one_all_but_the_ranks_own_has_its_plain_name():
    assert "model.weight" in {i.name for i in items.tensors(rank_state(0, 1, 5).layout)}
    assert "ranks.0.model.seen" in {i.name for i in items.tensors(rank_state(0, 1, 5).layout)}


def test_containers_are_followed_as_dcp_follows_them():
    tree = {"a": {"b": 1, 3: 2}, "list": [1, 2], "dicts": [{"x": 1}], "tuple": (1, 2), "held": (Ref(0), 5),
            "empty": {}, "deep": deque([Ref(1)]), ("odd", "key"): {"y": Ref(2)}}  # fmt: skip
    found = dict(items.walk(tree))
    assert found[("a", "b")] == 1
    assert found[("a", "3")] == 2
    assert found[("list",)] == [1, 2]
    assert found[("dicts", 0, "x")] == 1
    assert found[("tuple",)] == (1, 2)
    assert (found[("held", 0)], found[("held", 1)]) == (Ref(0), 5)
    assert found[("empty",)] == {}
    assert found[("deep", 0)] == Ref(1)
    assert found[("('odd', 'key')", "y")] == Ref(2)


def test_numpys_types_are_torchs_or_bytes():
    leaves, _ = place([Leaf("o/a", "<f8", (2,), 16, kind="array"), Leaf("o/b", "<U3", (2,), 24, kind="array")])
    known, foreign = items.tensors(Layout(0, 1, (Section("o", {"a": Ref(0), "b": Ref(1)}, leaves),)))
    assert (known.dtype, known.sizes) == ("float64", (2,))
    assert (foreign.dtype, foreign.sizes, foreign.shape) == ("uint8", (24,), (24,))


def test_a_shard_of_a_type_that_dcp_cannot_hold_is_refused_by_name():
    leaf = Leaf("model/w", "complex32", (2,), 8, global_shape=(4,), offsets=(0,))
    (item,) = items.tensors(Layout(0, 2, (Section("model", {"w": Ref(0)}, (leaf,)),)))
    with pytest.raises(CheckpointError, match=r"model\.w is a shard of element type complex32.*convert"):
        _ = item.shape
