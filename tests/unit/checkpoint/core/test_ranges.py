"""What is in pieces, taken up by worlds that are divided otherwise: pure, over layouts and bytes made up here."""

import itertools
import struct
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.core.layout import Layout, Leaf, Pieces, Ref, Section
from everstep.checkpoint.core.manifest import checksum
from everstep.checkpoint.core.ranges import Parts, cut_otherwise, tensors_of
from everstep.checkpoint.core.rectangles import rectangles
from everstep.checkpoint.core.reshard import Wish, reshard

ITEM = 4


def leaf(path, shape, box, **told):
    offsets = box.offsets if any(box.offsets) else None
    return Leaf(path, "int32", box.sizes, ITEM * box.count, global_shape=shape, offsets=offsets, **told)


def section(name, shape, start, stop, **told):
    """A rank's range of one tensor `w` whose elements are their own numbers, and its bytes by path."""
    boxes = rectangles(shape, start, stop)
    leaves = [leaf(f"{name}/w" + f"#{n}" * (n > 0), shape, box, **told) for n, box in enumerate(boxes)]
    tree = {"w": Pieces(tuple(range(len(leaves))), shape, "int32")}
    return Section(name, tree, tuple(leaves)), {one.path: content(one) for one in leaves}


def numbers(one):
    strides = [prod(one.whole_shape[d + 1 :]) for d in range(len(one.whole_shape))]
    places = itertools.product(*(range(a, a + s) for a, s in zip(one.starts, one.shape, strict=True)))
    return [sum(a * s for a, s in zip(at, strides, strict=True)) for at in places]


def content(one):
    return struct.pack(f"<{prod(one.shape)}i", *numbers(one))


def assembled(made, one, saved):
    """Bytes of a leaf that is made, from its pieces."""
    found = {}
    for piece in made.pieces[one.path]:
        raw = struct.unpack(f"<{prod(piece.source.shape)}i", saved[piece.rank][piece.source.path])
        for at in itertools.product(*map(range, piece.sizes)):
            source = flat([a + b for a, b in zip(at, piece.start, strict=True)], piece.source.shape)
            target = flat([a + b for a, b in zip(at, piece.into, strict=True)], one.shape)
            assert target not in found, "an element twice"
            found[target] = raw[source]
    return [found[n] for n in range(prod(one.shape))]


def flat(at, shape):
    number = 0
    for a, s in zip(at, shape, strict=True):
        number = number * s + a
    return number


def digest(saved):
    return lambda rank, one: checksum(saved[rank][one.path])


def cuts(total, marks):
    ends = [0, *sorted(min(total, m) for m in marks), total]
    return list(itertools.pairwise(ends))


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
MARKS = st.lists(st.integers(0, 64), max_size=4)


@settings(deadline=None)
@given(SHAPES, MARKS, MARKS)
def test_ranges_of_any_world_become_those_of_any_other(shape, before, after):
    """C7: uneven and empty parts; each wanted element comes from exactly one that was saved."""
    total = prod(shape)
    parts = [section("model", shape, a, b) for a, b in cuts(total, before)]
    layouts = [Layout(n, len(parts), (one,)) for n, (one, _) in enumerate(parts)]
    saved = [raw for _, raw in parts]
    ranges = cuts(total, after)
    for rank, (start, stop) in enumerate(ranges):
        live, _ = section("model", shape, start, stop)
        wish = Wish(by_leaf=True, wanted=tensors_of(live))
        made = reshard(layouts, rank, len(ranges), {"model": wish}, digest(saved))
        assert made.refused == {}
        (found,) = made.layout.sections
        node = found.tree["w"]
        assert [(found.leaves[n].starts, found.leaves[n].shape) for n in node.leaves] == [
            (one.starts, one.shape) for one in live.leaves
        ]
        got = [value for n in node.leaves for value in assembled(made, found.leaves[n], saved)]
        assert got == list(range(start, stop))


@settings(deadline=None)
@given(SHAPES, MARKS, st.integers(1, 4))
def test_ranges_become_shards_and_whole_tensors_and_these_become_ranges(shape, marks, world):
    """FSDP1 to FSDP2 and DDP, and back."""
    total = prod(shape)
    parts = [section("model", shape, a, b) for a, b in cuts(total, marks)]
    ranged = [Layout(n, len(parts), (one,)) for n, (one, _) in enumerate(parts)]
    saved = [raw for _, raw in parts]
    size = -(-shape[0] // world)
    for rank in range(world):
        low, high = min(shape[0], rank * size), min(shape[0], (rank + 1) * size)
        shard = Leaf("model/w", "int32", (high - low, *shape[1:]), 0, global_shape=shape,
                     offsets=(low, *[0] * (len(shape) - 1)), placements=("S(0)",))  # fmt: skip
        whole = Leaf("model/w", "int32", shape, 0, replicated=True)
        for want in (shard, whole):
            made = reshard(ranged, rank, world, {"model": Wish(by_leaf=True, wanted={("w",): want})}, digest(saved))
            (one,) = made.layout.leaves()
            assert made.refused == {}
            assert (one.shape, one.placements) == (want.shape, want.placements)
            assert assembled(made, one, saved) == numbers(one)
    tree = {"w": Ref(0)}
    wholes = [Leaf("model/w", "int32", shape, ITEM * total, replicated=True)] * 2
    layouts = [Layout(n, 2, (Section("model", tree, (one,)),)) for n, one in enumerate(wholes)]
    raw = [{"model/w": content(wholes[0])}] * 2
    live, _ = section("model", shape, total // 3, total)
    made = reshard(layouts, 1, 3, {"model": Wish(by_leaf=True, wanted=tensors_of(live))}, digest(raw))
    got = [value for one in made.layout.leaves() for value in assembled(made, one, raw)]
    assert got == list(range(total // 3, total))
    assert {piece.rank for pieces in made.pieces.values() for piece in pieces} <= {1}, "of equal ones its own"


def state(shape, start, stop, step):
    """An optimizer's state of one parameter on a rank, with its counter; without elements there is none."""
    if start == stop:
        return Section("o/state", {}, ()), {}
    one, raw = section("o/state", shape, start, stop)
    count = Leaf("o/state/w/step", "int32", (), ITEM)
    tree = {"w": {"step": Ref(len(one.leaves)), "exp_avg": one.tree["w"]}}
    return Section("o/state", tree, (*one.leaves, count)), raw | {count.path: struct.pack("<i", step)}


def taken(states, want, rank=0, world=2):
    layouts = [Layout(n, len(states), (one,)) for n, (one, _) in enumerate(states)]
    saved = [raw for _, raw in states]
    wish = Wish(by_leaf=True, wanted={("w",): want})
    return reshard(layouts, rank, world, {"o/state": wish}, digest(saved)), saved


def test_state_beside_a_range_goes_with_it_and_a_counter_is_that_of_whoever_holds_a_part():
    shape = (3, 2)
    live, _ = section("o/state", shape, 0, 4)
    want = Parts(shape, live.leaves)
    states = [state(shape, 0, 5, 7), state(shape, 5, 6, 7), state(shape, 6, 6, 0)]
    made, saved = taken([(replace(one, kind="AdamW"), raw) for one, raw in states], want)
    (found,) = made.layout.sections
    assert found.kind == "AdamW", "which class saved it is known in pieces too"
    node = found.tree["w"]
    got = [v for n in node["exp_avg"].leaves for v in assembled(made, found.leaves[n], saved)]
    assert got == [0, 1, 2, 3]
    assert assembled(made, found.leaves[node["step"].leaf], saved) == [7]
    made, _ = taken([state(shape, 0, 5, 7), state(shape, 5, 6, 8)], want, world=3)
    assert "o/state/w/step differs from rank to rank" in made.refused["o/state/w/step"]


def test_a_rank_without_elements_has_no_state_there():
    made, _ = taken([state((4,), 0, 2, 7), state((4,), 2, 4, 7)], Parts((4,), (), nothing=True))
    (found,) = made.layout.sections
    assert (found.tree, found.leaves) == ({}, ())


@pytest.mark.parametrize("fault", ["gap", "overlap", "dtype", "unsaid"])
def test_what_does_not_tile_the_tensor_or_has_no_meaning_is_refused_by_name(fault):
    ranges = {"gap": [(0, 2), (3, 6)], "overlap": [(0, 4), (3, 6)]}.get(fault, [(0, 3), (3, 6)])
    parts = [section("model", (6,), a, b) for a, b in ranges]
    if fault == "dtype":
        one, raw = parts[1]
        other = Leaf(**{f: getattr(one.leaves[0], f) for f in one.leaves[0].__slots__} | {"dtype": "float32"})
        parts[1] = Section("model", {"w": Pieces((0,), (6,), "float32")}, (other,)), raw
    live, _ = section("model", (6,), 0, 6)
    wanted = {} if fault == "unsaid" else tensors_of(live)
    layouts = [Layout(n, 2, (one,)) for n, (one, _) in enumerate(parts)]
    made = reshard(layouts, 0, 1, {"model": Wish(by_leaf=True, wanted=wanted)}, digest([raw for _, raw in parts]))
    words = {"gap": "do not cover [6]", "overlap": "do not cover [6]", "dtype": "on different ranks",
             "unsaid": "nothing says how it is divided here"}  # fmt: skip
    assert words[fault] in made.refused["model/w"]


def test_what_is_cut_otherwise_is_told_from_what_is_not():
    saved, _ = section("model", (6,), 0, 3)
    other, _ = section("model", (6,), 0, 4)
    assert not cut_otherwise(saved, tensors_of(saved))
    assert cut_otherwise(saved, tensors_of(other))
    assert cut_otherwise(saved, {("w",): Leaf("model/w", "int32", (6,), 24)})
    whole = Section("model", {"w": Ref(0)}, (Leaf("model/w", "int32", (6,), 24),))
    assert cut_otherwise(whole, tensors_of(saved))
    assert not cut_otherwise(whole, tensors_of(whole))
