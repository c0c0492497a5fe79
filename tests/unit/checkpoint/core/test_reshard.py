"""From one world's descriptions to another's state: by brute force, and refused by name where it has no meaning."""

import itertools
import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.core.layout import Layout, Leaf, Pieces, Ref, Section, place
from everstep.checkpoint.core.manifest import checksum
from everstep.checkpoint.core.reshard import SEED, Wish, reshard, seed_of

ITEM = 4


def rectangle(shape, starts, sizes):
    """The bytes of a rectangle of a tensor whose elements are numbered."""
    strides = [1] * len(shape)
    for n in range(len(shape) - 2, -1, -1):
        strides[n] = strides[n + 1] * shape[n + 1]
    places = itertools.product(*[range(a, a + b) for a, b in zip(starts, sizes, strict=True)])
    return b"".join(struct.pack("<i", sum(p * s for p, s in zip(place, strides, strict=True))) for place in places)


def sharded(path, shape, starts, sizes, **facts):
    nbytes = ITEM
    for size in sizes:
        nbytes *= size
    whole = tuple(sizes) == tuple(shape)
    return Leaf(path, "int32", tuple(sizes), nbytes, global_shape=None if whole else tuple(shape),
                offsets=tuple(starts) if any(starts) else None, placements=("S(0)",), **facts)  # fmt: skip


class World:
    """Ranks that saved, each with its sections and the bytes of their leaves."""

    def __init__(self, size):
        self.layouts = [Layout(rank, size, ()) for rank in range(size)]
        self.bytes = {}

    def add(self, name, ranks, tree=None, per_rank=False):
        """`ranks`: for each rank its leaves with their bytes."""
        for rank, leaves in enumerate(ranks):
            placed, _ = place([leaf for leaf, _ in leaves])
            self.bytes |= {(rank, leaf.path): content for leaf, content in leaves}
            at = {leaf.path.removeprefix(f"{name}/"): Ref(n) for n, leaf in enumerate(placed)}
            section = Section(name, at if tree is None else tree[rank] if per_rank else tree, placed, per_rank)
            layout = self.layouts[rank]
            self.layouts[rank] = replace(layout, sections=(*layout.sections, section))
        return self

    def digest(self, rank, leaf):
        return checksum(self.bytes[rank, leaf.alias_of or leaf.path])

    def reshard(self, rank, size, wishes=None):
        return reshard(self.layouts, rank, size, wishes or {}, self.digest)

    def assemble(self, made, leaf):
        """What `made` gives for a leaf, element by element; each must come from exactly one piece."""
        if leaf.kind != "tensor" or leaf.dtype != "int32":
            (piece,) = made.pieces[leaf.path]
            return self.bytes[piece.rank, piece.source.alias_of or piece.source.path]
        content = []
        for at in itertools.product(*map(range, leaf.shape)):
            inside = [
                p for p in made.pieces[leaf.alias_of or leaf.path]
                if all(i <= a < i + s for a, i, s in zip(at, p.into, p.sizes, strict=True))
            ]  # fmt: skip
            (piece,) = inside
            source = [a - i + s for a, i, s in zip(at, piece.into, piece.start, strict=True)]
            flat = 0
            for n, size in zip(source, piece.source.shape, strict=True):
                flat = flat * size + n
            raw = self.bytes[piece.rank, piece.source.alias_of or piece.source.path]
            content.append(raw[flat * ITEM : flat * ITEM + ITEM])
        return b"".join(content)


def chunks(length, count):
    """As torch divides: equal ones, a shorter one, empty ones."""
    size = -(-length // count)
    ends = [min(length, size * n) for n in range(count + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def uneven(rng, length, count):
    cuts = sorted(rng.randint(0, length) for _ in range(count - 1))
    return [(a, b - a) for a, b in itertools.pairwise([0, *cuts, length])]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_every_element_comes_from_where_it_was(seed, before, after, evenly):
    """Any number of ranks, any dimension, uneven and empty shards: into shards of another world, and into the whole."""
    rng = random.Random(seed)
    shape = [rng.randint(0, 6) for _ in range(rng.randint(1, 3))]
    dim, other = rng.randrange(len(shape)), rng.randrange(len(shape))

    def rectangles(dim, count):
        cuts = chunks(shape[dim], count) if evenly else uneven(rng, shape[dim], count)
        for start, size in cuts:
            yield ([start if n == dim else 0 for n in range(len(shape))],
                   [size if n == dim else shape[n] for n in range(len(shape))])  # fmt: skip

    saved = [sharded("model/w", shape, *r) for r in rectangles(dim, before)]
    contents = [rectangle(shape, leaf.starts, leaf.shape) for leaf in saved]
    world = World(before).add("model", [[(leaf, c)] for leaf, c in zip(saved, contents, strict=True)])
    for rank, (starts, sizes) in enumerate(rectangles(other, after)):
        like = sharded("model/w", shape, starts, sizes)
        made = world.reshard(rank, after, {"model": Wish({0: like}, by_leaf=True)})
        assert made.refused == {}
        (leaf,) = made.layout.leaves()
        assert (leaf.shape, leaf.starts, leaf.whole_shape) == (like.shape, like.starts, like.whole_shape)
        assert world.assemble(made, leaf) == rectangle(shape, starts, sizes)
    plain = Leaf("model/w", "int32", tuple(shape), 0, replicated=True)
    made = world.reshard(0, 1, {"model": Wish({0: plain}, by_leaf=True)})
    (leaf,) = made.layout.leaves()
    assert (leaf.placements, leaf.replicated) == ((), True)
    assert world.assemble(made, leaf) == rectangle(shape, [0] * len(shape), shape)


def test_a_mesh_of_replicas_and_shards_is_read_once_and_near():
    rectangles = [((0, 0), (3, 4)), ((3, 0), (2, 4))]
    leaves = [sharded("model/w", (5, 4), *rectangles[rank % 2]) for rank in range(4)]
    world = World(4).add("model", [[(leaf, rectangle((5, 4), leaf.starts, leaf.shape))] for leaf in leaves])
    like = Leaf("model/w", "int32", (5, 4), 80, replicated=True)
    pieces = {rank: world.reshard(rank, 3, {"model": Wish({0: like})}).pieces["model/w"] for rank in range(3)}
    assert {rank: [piece.rank for piece in found] for rank, found in pieces.items()} == {
        0: [0, 1],
        1: [1, 0],
        2: [2, 1],
    }


@pytest.mark.parametrize("fault", ["gap", "overlap"])
def test_shards_that_do_not_tile_the_whole_are_refused(fault):
    starts = {"gap": 4, "overlap": 2}[fault]
    leaves = [sharded("model/w", (6,), (0,), (3,)), sharded("model/w", (6,), (starts,), (2,))]
    world = World(2).add("model", [[(leaf, rectangle((6,), leaf.starts, leaf.shape))] for leaf in leaves])
    like = Leaf("model/w", "int32", (6,), 24)
    made = world.reshard(0, 1, {"model": Wish({0: like}, by_leaf=True)})
    assert "do not cover [6] from [0] on exactly" in made.refused["model/w"]


def test_the_whole_goes_into_shards():
    whole = Leaf("model/w", "int32", (7, 2), 56, replicated=True)
    content = rectangle((7, 2), (0, 0), (7, 2))
    world = World(2).add("model", [[(whole, content)]] * 2)
    for rank, (start, size) in enumerate(chunks(7, 3)):
        like = sharded("model/w", (7, 2), (start, 0), (size, 2), device="cuda")
        made = world.reshard(rank, 3, {"model": Wish({0: like})})
        (leaf,) = made.layout.leaves()
        assert (leaf.placements, leaf.device) == (("S(0)",), "cuda")
        assert world.assemble(made, leaf) == rectangle((7, 2), (start, 0), (size, 2))
        assert [piece.rank for piece in made.pieces["model/w"]] == [rank % 2]


def test_another_shape_is_left_to_whoever_compares():
    world = World(2).add("model", [
        [(sharded("model/w", (4,), (n * 2,), (2,)), rectangle((4,), (n * 2,), (2,)))] for n in range(2)
    ])  # fmt: skip
    made = world.reshard(0, 1, {"model": Wish({0: Leaf("model/w", "int32", (5,), 20)}, by_leaf=True)})
    (leaf,) = made.layout.leaves()
    assert (leaf.shape, leaf.whole_shape, made.refused) == ((4,), (4,), {})


def test_a_shard_in_an_object_that_knows_nothing_of_it_is_refused():
    world = World(2).add("ema", [
        [(sharded("ema/w", (4,), (n * 2,), (2,)), rectangle((4,), (n * 2,), (2,)))] for n in range(2)
    ])  # fmt: skip
    made = world.reshard(0, 3)
    assert made.refused == {"ema/w": "ema/w was saved in shards, and nothing says how it is divided here"}
    assert made.layout.sections == ()


def own(path, content, **facts):
    return Leaf(path, "int32", (len(content) // 4,), len(content), per_rank=True, **facts), content


def test_what_all_ranks_held_alike_is_one_thing():
    world = World(2).add("scheduler", [[own("scheduler/x", b"same" * 2)]] * 2, per_rank=False)
    made = world.reshard(1, 3)
    assert made.refused == {}
    assert world.assemble(made, next(made.layout.leaves())) == b"same" * 2


def test_a_buffer_that_differs_is_rank_0_s_where_it_leads_and_else_refused_alone():
    for leads in (True, False):
        ranks = [[own("model/mean", bytes([n]) * 4, leads=leads), own("model/seen", b"same")] for n in range(2)]
        world = World(2).add("model", ranks)
        made = world.reshard(1, 3, {"model": Wish(by_leaf=True)})
        if leads:
            assert made.refused == {}
            assert world.assemble(made, next(made.layout.leaves())) == bytes(4)
        else:
            assert list(made.refused) == ["model/mean"]
            assert "model/mean differs from rank to rank (0 and 1, for example)" in made.refused["model/mean"]


@pytest.mark.parametrize(
    ("trees", "told"),
    [
        ([{"lr": 0.1, "n": [1, 2]}, {"lr": 0.1, "n": [1, 3]}], "scheduler/n/1 is 2 on rank 0 and 3 on rank 1"),
        ([{"lr": 0.1}, {"lr": 0.1, "more": 1}], "scheduler/more is there on rank 1 and not on rank 0"),
        ([{"lr": 0.1, "less": 1}, {"lr": 0.1}], "scheduler/less is there on rank 0 and not on rank 1"),
        ([{"lr": float("nan")}, {"lr": -0.0}], "scheduler/lr is nan on rank 0 and -0.0 on rank 1"),
        ([(1, 2), (1, 3)], "scheduler is (1, 2) on rank 0 and (1, 3) on rank 1"),
    ],
)
def test_what_belongs_to_a_rank_alone_is_refused_with_the_place_and_both_values(trees, told):
    world = World(2).add("scheduler", [[], []], trees, per_rank=True)
    made = world.reshard(0, 3)
    assert made.refused["scheduler"].startswith(told)
    assert made.layout.section("scheduler") is None


def test_a_section_that_some_ranks_alone_have_is_refused():
    world = World(3).add("model", [[], [], []])
    lone = Layout(2, 3, (Section("model", {}), Section("expert", {})))
    world.layouts[2] = lone
    assert world.reshard(0, 2).refused == {"expert": "expert was saved by some ranks alone, not by rank 0-1"}


def test_what_was_tied_stays_tied_unless_its_shape_here_forbids():
    leaf, tied = (
        Leaf("model/a", "int32", (4,), 16, replicated=True),
        Leaf("model/b", "int32", (4,), 16, replicated=True),
    )
    ranks = [[(leaf, bytes(16)), (replace(tied, alias_of="model/a"), bytes(16))]] * 2
    world = World(2).add("model", ranks)
    made = world.reshard(0, 1, {"model": Wish({0: leaf, 1: tied})})
    assert [each.alias_of for each in made.layout.leaves()] == [None, "model/a"]
    assert list(made.pieces) == ["model/a"]
    apart = sharded("model/b", (4,), (0,), (2,))
    made = world.reshard(0, 2, {"model": Wish({0: leaf, 1: apart})})
    assert [each.alias_of for each in made.layout.leaves()] == [None, None]


# Generators.


def rng_world(states, extra=0.5):
    """Python's generator of each rank by its bytes, NumPy's alike on all."""
    world = World(len(states))
    trees = [{"python": [3, Ref(0), None], "numpy": ["MT", Ref(1), extra]} for _ in states]
    leaves = [[own("rng/python", state), own("rng/numpy", b"alike...")] for state in states]
    return world.add("rng", leaves, trees, per_rank=True)


def test_generators_that_were_alike_stay_so_others_go_with_their_rank_and_new_ranks_are_seeded():
    world = rng_world([b"rank0...", b"rank1..."])
    draws = {"rng": Wish(draws=True)}
    for rank in range(4):
        made = world.reshard(rank, 4, draws)
        tree = made.layout.section("rng").tree
        content = [world.assemble(made, leaf) for leaf in made.layout.leaves()]
        if rank < 2:
            assert content == [f"rank{rank}...".encode(), b"alike..."]
            assert tree == {"python": [3, Ref(0), None], "numpy": ["MT", Ref(1), 0.5]}
            assert made.told == ()
        else:
            assert content == [b"alike..."]
            assert tree["numpy"] == ["MT", Ref(0), 0.5]
            assert 0 <= tree["python"][SEED] < 2**63
            assert made.told == (f"rank {rank} has no generators of its own in the saved state: derived from rank 0's",)
    seeds = [world.reshard(rank, 4, draws).layout.section("rng").tree["python"][SEED] for rank in (2, 3)]
    assert seeds[0] != seeds[1]
    other = rng_world([b"rank0...", b"another."])
    again = [other.reshard(rank, 9, draws).layout.section("rng").tree["python"][SEED] for rank in (2, 3)]
    assert again == seeds, "a function of rank 0's state and the number alone"
    assert seed_of("a", "b", 1) != seed_of("a", "b", 2)


def test_a_generator_that_some_ranks_alone_had_is_left_out_where_it_was_not():
    world = rng_world([b"rank0...", b"rank1..."])
    first, second = world.layouts
    more = Section("rng", {**first.sections[0].tree, "cuda": {0: Ref(0)}}, first.sections[0].leaves, per_rank=True)
    world.layouts = [replace(first, sections=(more,)), second]
    draws = {"rng": Wish(draws=True)}
    assert "cuda" in world.reshard(0, 3, draws).layout.section("rng").tree
    assert "cuda" not in world.reshard(1, 3, draws).layout.section("rng").tree
    assert SEED in world.reshard(2, 3, draws).layout.section("rng").tree["cuda"]


# The position in the data.

HOLDS = frozenset({"consumed", "length", "shuffle", "seed"})
COUNTS = {"loader": Wish(counts=True, holds=HOLDS)}


def loader(consumed=40, base=7, **more):
    sampler = {"consumed": consumed, "length": 100, "shuffle": True, "seed": 0}
    return {"_snapshot": {"_main": {"_base_seed": base, "sampler": {"sampler_state": sampler}}, "step": 5}, **more}


def test_a_position_of_the_world_is_taken_and_seeds_of_workers_go_with_their_rank():
    world = World(2).add("loader", [[], []], [loader(base=7), loader(base=8)], per_rank=True)
    bases = []
    for rank in range(3):
        made = world.reshard(rank, 3, COUNTS)
        assert made.refused == {}
        main = made.layout.section("loader").tree["_snapshot"]["_main"]
        assert main["sampler"]["sampler_state"]["consumed"] == 40
        bases.append(main["_base_seed"])
    assert bases[:2] == [7, 8]
    assert bases[2] not in bases[:2]


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([loader(40), loader(44)], "consumed is 40 on rank 0 and 44 on rank 1: the ranks do not stand at one position"),
        ([loader(dataset=1), loader(dataset=2)], "loader/dataset is 1 on rank 0 and 2 on rank 1"),
        ([{"yielded": 5}, {"yielded": 5}], "loader was saved with a position that counts for each rank alone"),
    ],
)
def test_positions_that_are_not_one_are_refused(states, told):
    made = World(2).add("loader", [[], []], states, per_rank=True).reshard(0, 3, COUNTS)
    assert told in made.refused["loader"]
    assert made.layout.section("loader") is None


def test_a_refusal_of_the_live_object_comes_first():
    world = World(2).add("loader", [[], []], [loader(), loader()], per_rank=True)
    assert world.reshard(0, 3, {"loader": Wish(refusal="Mine counts for a rank")}).refused == {
        "loader": "Mine counts for a rank"
    }


def test_a_position_s_tensors_come_along():
    trees = [{"a": {"consumed": 1, "length": 2, "shuffle": True, "seed": 0}, "t": [Ref(0)]}] * 2
    world = World(2).add("loader", [[own("loader/t", b"same")]] * 2, trees, per_rank=True)
    made = world.reshard(0, 1, COUNTS)
    assert world.assemble(made, next(made.layout.leaves())) == b"same"
    other = World(2).add("loader", [[own("loader/t", b"same")], [own("loader/t", b"else")]], trees, per_rank=True)
    assert "loader/t differs" in other.reshard(0, 1, COUNTS).refused["loader"]


def test_ranges_of_fsdp1_that_nobody_here_knows_are_refused_by_name():
    """How they are taken up where somebody does: test_ranges.py."""
    trees = [{"w": Pieces((0,), (4,), "int32")}, {"w": Pieces((), (4,), "int32")}]
    leaf = sharded("model/w", (4,), (0,), (4,))
    world = World(2).add("model", [[(leaf, rectangle((4,), (0,), (4,)))], []], trees, per_rank=True)
    made = world.reshard(0, 3, {"model": Wish(by_leaf=True)})
    assert "was saved in pieces, and nothing says how it is divided here" in made.refused["model/w"]


def test_in_a_world_of_the_same_size_each_rank_has_its_own_again():
    """FSDP2 where there was DDP: nothing that belongs to a rank is asked to be alike."""
    world = World(2).add(
        "box",
        [[own("box/x", bytes([n]) * 4)] for n in range(2)],
        [{"n": 1, "x": Ref(0)}, {"n": 2, "x": Ref(0)}],
        per_rank=True,
    )
    for rank in range(2):
        made = world.reshard(rank, 2, {"box": Wish(refusal="a sampler of its own")})
        assert made.refused == {}
        assert made.layout.section("box").tree["n"] == rank + 1
        assert world.assemble(made, next(made.layout.leaves())) == bytes([rank]) * 4
