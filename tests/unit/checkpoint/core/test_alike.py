"""What of a snapshot another rank's holds as well: by name, type and rectangle, and never what is a rank's own."""

import pytest

from everstep.checkpoint.core.alike import Run, alike, lacking
from everstep.checkpoint.core.layout import Layout, Leaf, Section, place

BIG = 8192


def layout(rank, *leaves, world=4):
    return Layout(rank, world, (Section("model", {}, place(leaves)[0]),))


def plain(path, **more):
    return Leaf(path, "uint8", (BIG,), BIG, **({"replicated": True} | more))


def shard(path, at, whole=4, placements=("R", "S(0)")):
    return Leaf(path, "uint8", (BIG,), BIG, global_shape=(whole * BIG,), offsets=(at * BIG,), placements=placements)


def test_what_all_ranks_hold_is_had_wherever_it_lies_in_either():
    mine = layout(0, plain("a"), plain("own", per_rank=True), plain("b"))
    theirs = layout(2, plain("b"), plain("c"), plain("a"), plain("own", per_rank=True))
    assert alike(mine, theirs) == [Run(0, 2 * BIG, BIG), Run(2 * BIG, 0, BIG)]


def test_a_shard_is_had_from_whoever_has_the_same_one():
    mine = layout(0, shard("w", 1), shard("v", 1))
    assert alike(mine, layout(2, shard("w", 1), shard("v", 2))) == [Run(0, 0, BIG)]
    assert alike(mine, layout(1, shard("w", 0), shard("v", 0))) == []


@pytest.mark.parametrize(
    "other",
    [
        plain("a", replicated=False, per_rank=True), plain("a", replicated=False), shard("a", 0),
        Leaf("a", "int8", (BIG,), BIG, replicated=True), Leaf("a", "uint8", (2, BIG // 2), BIG, replicated=True),
        Leaf("a", "uint8", (2 * BIG,), 2 * BIG, replicated=True), plain("a", kind="bytes"), plain("other"),
    ],
)  # fmt: skip
def test_what_is_not_said_to_be_the_same_is_not_had(other):
    assert alike(layout(0, plain("a")), layout(1, other)) == []


def test_what_is_small_an_alias_or_of_a_world_of_another_size_is_sent():
    small = Leaf("s", "uint8", (8,), 8, replicated=True)
    tied = Leaf("t", "uint8", (BIG,), BIG, replicated=True, alias_of="a")
    mine = layout(0, plain("a"), small, tied)
    assert alike(mine, layout(1, plain("a"), small, tied)) == [Run(0, 0, BIG)]
    assert alike(mine, layout(1, plain("a"), world=8)) == []


def test_the_rest_is_what_lies_between():
    assert lacking([], 3, 9) == [(3, 9)]
    assert lacking([(3, 9)], 3, 9) == []
    assert lacking([(4, 5), (5, 6), (8, 9)], 3, 12) == [(3, 4), (6, 8), (9, 12)]
    assert lacking([(4, 7), (5, 6)], 3, 9) == [(3, 4), (7, 9)]
