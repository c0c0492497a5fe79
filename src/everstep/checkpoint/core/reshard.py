"""What a rank of one world takes up from the snapshots of another: its description, and where its bytes come from.

From the descriptions of all ranks that saved, and the live objects' own (a `Wish` for each section), `reshard` makes
the description that this rank would have saved in this world. Whoever restores it knows nothing of the other world.

Rule 1: a tensor is cut out of the rectangles that were saved. They must cover what is wanted exactly: no element twice,
    none missing. Uneven, empty and padded shards are rectangles like others.
Rule 2: what all ranks hold bit for bit is taken from any of them; this rank's own number first.
Rule 3: what belongs to a rank alone means the same in another world only where all ranks held the same (a scheduler, a
    scaler, an optimizer's groups); or where its first rank's is what all have after the next step anyhow (`leads`:
    DDP broadcasts buffers). All else is refused by its name, never guessed. In a world of the same size that is
    divided otherwise (FSDP2 and DDP) each rank has its own again.
Rule 4: random generators that were equal on all ranks stay so. Else a rank goes on with those of its own number, and
    one that was not there is seeded by a checksum of rank 0's generators and of its number. The same in every attempt.
Rule 5: the position in the data counts for the whole world or is refused; it must be the same on all ranks. What a
    loader holds beside it must be too, seeds of its workers (rule 4) excepted.

Rejected: to let `torch.distributed.checkpoint.load` do it. It unpickles, checks no checksum, reads files alone, and
steps a fresh optimizer to learn what to load. Rejected: the mean of buffers that differ; no state ever held it.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from everstep.checkpoint.core.layout import Layout, Leaf, Node, Ref, Section, expected_bytes, place, printed
from everstep.checkpoint.core.manifest import checksum
from everstep.checkpoint.core.ranges import Held, Joiner, Parts, Place, Wanted
from everstep.checkpoint.core.trees import contains, difference, in_pieces, mapped, refs, seeded, without
from everstep.ranks import brief

Digest = Callable[[int, Leaf], str]
"""Checksum of a leaf's bytes on a rank that saved."""

SEED = "seed"
POSITION = frozenset({"consumed", "length", "shuffle", "seed"})
"""Keys of `everstep.data.GlobalSampler`'s state: a position that counts for the whole world."""

_WORKER_SEEDS = frozenset({"_base_seed"})  # torchdata's name of what the random states of a loader's workers come from


@dataclass(frozen=True, slots=True)
class Wish:
    """How a section is to look in this world. `like`: live leaves, by index of the saved one that they stand for."""

    like: Mapping[int, Leaf] = field(default_factory=dict[int, Leaf])
    by_leaf: bool = False  # each leaf may be left out by itself (a model's, an optimizer's)
    draws: bool = False  # random generators: rule 4
    counts: bool = False  # a position in the data: rule 5
    holds: Set[str] = frozenset()  # keys of a dict that such a position must have been saved with
    refusal: str = ""  # why it cannot go to another world, whatever was saved
    wanted: Mapping[Place, Wanted] = field(default_factory=dict[Place, Wanted])  # by place: for what is in pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a saved leaf, and where it goes. Of a leaf that is no tensor: all of it."""

    rank: int  # of the world that saved
    source: Leaf
    start: tuple[int, ...]  # in the source, which holds `source.shape`
    into: tuple[int, ...]  # in the leaf that is made
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resharded:
    """One rank's state in this world."""

    layout: Layout
    pieces: Mapping[str, tuple[Piece, ...]]  # by path of a leaf that is no alias
    refused: Mapping[str, str] = field(default_factory=dict[str, str])  # section or leaf → why it has no meaning here
    told: tuple[str, ...] = ()  # what was decided that a user should know


@dataclass(slots=True)
class _Making:
    """One rank's state as it grows."""

    saved: Sequence[Layout]
    rank: int
    world_size: int
    digest: Digest
    sections: list[Section] = field(default_factory=list[Section])
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict[str, tuple[Piece, ...]])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    told: list[str] = field(default_factory=list[str])
    end: int = 0

    @property
    def own(self) -> int:
        """The rank that saved whose number is ours, or that stands for it."""
        return self.rank if self.rank < len(self.saved) else self.rank % len(self.saved)

    @property
    def same_size(self) -> bool:
        """Every rank of the one world is a rank of the other: what belongs to it alone is its own."""
        return len(self.saved) == self.world_size

    @property
    def new(self) -> bool:
        """No rank of the other world had our number."""
        return self.rank >= len(self.saved)

    def take(self, rank: int, leaf: Leaf) -> None:
        """Have a leaf's bytes as a rank has saved them."""
        zeros = (0,) * len(leaf.shape)
        self.pieces[leaf.path] = (Piece(rank, leaf, zeros, zeros, leaf.shape),)

    def add(self, section: Section, tree: Node, leaves: Sequence[Leaf]) -> None:
        placed, self.end = place(leaves, self.end)
        self.sections.append(Section(section.name, tree, placed, section.per_rank, kind=section.kind))


def reshard(
    saved: Sequence[Layout], rank: int, world_size: int, wishes: Mapping[str, Wish], digest: Digest
) -> Resharded:
    """Make this rank's state. `saved`: the descriptions of all ranks of the other world, in order."""
    making = _Making(saved, rank, world_size, digest)
    for name in dict.fromkeys(section.name for layout in saved for section in layout.sections):
        ranks = [layout.section(name) for layout in saved]
        there = [section for section in ranks if section is not None]
        lacking = [n for n, section in enumerate(ranks) if section is None]
        if lacking:
            making.refused[name] = f"{name} was saved by some ranks alone, not by rank {brief(lacking)}"
        else:
            _section(making, name, there, wishes.get(name, Wish()))
    if making.new and any(wish.draws for wish in wishes.values()):
        making.told.append(f"rank {rank} has no generators of its own in the saved state: derived from rank 0's")
    layout = Layout(rank, world_size, tuple(making.sections))
    return Resharded(layout, making.pieces, making.refused, tuple(making.told))


def _section(making: _Making, name: str, ranks: Sequence[Section], wish: Wish) -> None:
    pieces = any(isinstance(want, Parts) for want in wish.wanted.values())
    if making.same_size and not (wish.by_leaf or wish.like or pieces):
        _own(making, ranks[making.rank])
    elif wish.refusal:
        making.refused[name] = wish.refusal
    elif wish.draws:
        _generators(making, name, ranks)
    elif wish.counts:
        _position(making, name, ranks, wish.holds)
    elif pieces or any(in_pieces(section.tree) for section in ranks):
        _in_pieces(making, name, ranks, wish)
    elif (where := difference(ranks)) is not None:
        making.refused[name] = (
            f"{where}: it belongs to each rank alone, and has no meaning in a world of another size; save what is "
            "alike on all ranks, or leave it out"
        )
    else:
        _alike(making, name, ranks, wish)


# What some hold in pieces.


def _in_pieces(making: _Making, name: str, ranks: Sequence[Section], wish: Wish) -> None:
    """Sections of which a rank may have any number of rectangles, on either side: by their places (ranges.py)."""

    def same(held: Sequence[Held]) -> bool:
        kinds = {(leaf.dtype, leaf.kind, leaf.shape) for _, leaf in held}
        return len(kinds) == 1 and len({making.digest(n, leaf) for n, leaf in held}) == 1

    joined = Joiner(ranks, wish.wanted, same, making.own, making.same_size).join()
    pieces: dict[str, tuple[Piece, ...]] = {}
    for leaf in joined.leaves:
        held = joined.sources[leaf.path]
        if leaf.kind != "tensor":
            ((rank, source),) = held
            zeros = (0,) * len(source.shape)
            pieces[leaf.path] = (Piece(rank, source, zeros, zeros, source.shape),)
            continue
        pieces[leaf.path], covered = _cut(held, leaf)
        if covered != prod(leaf.shape):
            joined.refused.setdefault(leaf.path, _uncovered(leaf, len(making.saved), covered))
    making.refused |= joined.refused
    if not joined.refused or wish.by_leaf:
        making.pieces |= pieces
        making.add(replace(ranks[0], tree=joined.tree, leaves=(), text=None), joined.tree, joined.leaves)


def _uncovered(leaf: Leaf, world: int, covered: int) -> str:
    return (
        f"{leaf.path}: the shards of {world} ranks do not cover {list(leaf.shape)} from {list(leaf.starts)} on exactly "
        f"({covered} of {prod(leaf.shape)} elements)"
    )


# What is one thing in the whole world.


def _alike(making: _Making, name: str, ranks: Sequence[Section], wish: Wish) -> None:
    """Sections of one tree: leaf by leaf."""
    made: list[Leaf] = []
    pieces: dict[str, tuple[Piece, ...]] = {}
    refused: dict[str, str] = {}
    for index, first in enumerate(ranks[0].leaves):
        leaf, parts, why = _leaf(making, [section.leaves[index] for section in ranks], wish.like.get(index))
        made.append(leaf)
        pieces[leaf.path] = parts
        if why:
            refused[first.path] = why
    making.refused |= refused
    if refused and not wish.by_leaf:
        return
    made = _tied(made, ranks)
    making.pieces |= {leaf.path: pieces[leaf.path] for leaf in made if leaf.alias_of is None}
    making.add(ranks[0], ranks[0].tree, made)


def _leaf(making: _Making, ranks: Sequence[Leaf], like: Leaf | None) -> tuple[Leaf, tuple[Piece, ...], str]:
    first = ranks[0]
    sharded = [leaf for leaf in ranks if leaf.placements or leaf.global_shape is not None]
    if sharded and not all(leaf.replicated for leaf in ranks):
        return _from_shards(making, ranks, like)
    source, why = making.own, ""
    if not all(leaf.replicated for leaf in ranks) and not making.same_size and not _same(making, ranks):
        source = 0
        if not all(leaf.leads for leaf in ranks):
            why = f"{first.path} {_apart(making, ranks)}: it belongs to each rank alone"
    target = _target(ranks[source], like)
    start = target.starts if target is not ranks[source] else (0,) * len(target.shape)
    piece = Piece(source, ranks[source], start, (0,) * len(target.shape), target.shape)
    return target, (piece,), why


def _from_shards(making: _Making, ranks: Sequence[Leaf], like: Leaf | None) -> tuple[Leaf, tuple[Piece, ...], str]:
    first = ranks[0]
    if like is None:
        why = f"{first.path} was saved in shards, and nothing says how it is divided here"
        return _whole(first), (), why
    target = _target(first, like)
    held = [(n, ranks[n]) for n in (making.own, *range(len(ranks)))]  # of equal ones the nearest
    pieces, covered = _cut(held, target)
    if covered != prod(target.shape):
        return target, (), _uncovered(replace(target, path=first.path), len(ranks), covered)
    return target, pieces, ""


def _cut(held: Sequence[Held], target: Leaf) -> tuple[tuple[Piece, ...], int]:
    """Return the pieces that make up the target, and how many elements they hold; -1 where two of them overlap.

    Of equal rectangles the first is taken.
    """
    rectangles: dict[tuple[tuple[int, ...], tuple[int, ...]], Held] = {}
    for n, leaf in held:
        if leaf.nbytes:
            rectangles.setdefault((leaf.starts, leaf.shape), (n, leaf))
    pieces: list[Piece] = []
    for (starts, shape), (n, source) in rectangles.items():
        low = tuple(map(max, starts, target.starts))
        high = tuple(min(a + b, c + d) for a, b, c, d in zip(starts, shape, target.starts, target.shape, strict=True))
        sizes = tuple(max(0, h - w) for h, w in zip(high, low, strict=True))
        if prod(sizes):
            start = tuple(a - b for a, b in zip(low, starts, strict=True))
            into = tuple(a - b for a, b in zip(low, target.starts, strict=True))
            pieces.append(Piece(n, source, start, into, sizes))
    if any(_overlap(a, b) for n, a in enumerate(pieces) for b in pieces[n + 1 :]):
        return (), -1
    return tuple(pieces), sum(prod(piece.sizes) for piece in pieces)


def _overlap(one: Piece, other: Piece) -> bool:
    bounds = zip(one.into, one.sizes, other.into, other.sizes, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in bounds)


def _target(saved: Leaf, like: Leaf | None) -> Leaf:
    """The leaf as it is to be here; whole where it has another shape than the live one, for whoever compares them."""
    if like is None or like.whole_shape != saved.whole_shape or saved.kind != "tensor":
        return saved if saved.shape == saved.whole_shape and not saved.placements else _whole(saved)
    made = replace(
        saved, shape=like.shape, global_shape=like.global_shape, offsets=like.offsets, placements=like.placements,
        replicated=like.replicated, per_rank=like.per_rank, alias_of=None, device=like.device,
        stride=saved.stride if saved.shape == like.shape else (),
        shares=saved.shares if saved.shape == like.shape else None,
    )  # fmt: skip
    return replace(made, nbytes=_bytes(made))


def _whole(saved: Leaf) -> Leaf:
    made = replace(saved, shape=saved.whole_shape, global_shape=None, offsets=None, placements=(), alias_of=None,
                   stride=saved.stride if saved.shape == saved.whole_shape else (), shares=None)  # fmt: skip
    return replace(made, nbytes=_bytes(made))


def _bytes(leaf: Leaf) -> int:
    known = expected_bytes(leaf)
    return leaf.nbytes if known is None else known


def _tied(made: Sequence[Leaf], ranks: Sequence[Section]) -> list[Leaf]:
    """Aliases stay aliases where every rank that held something had them tied, and they have one shape here."""
    by_path = {leaf.path: leaf for leaf in made}
    result: list[Leaf] = []
    for index, leaf in enumerate(made):
        said = {section.leaves[index].alias_of for section in ranks if section.leaves[index].nbytes}
        original = by_path.get(next(iter(said)) or "") if len(said) == 1 else None
        tied = original is not None and (original.shape, original.starts) == (leaf.shape, leaf.starts)
        result.append(replace(leaf, alias_of=original.path if original is not None and tied else None))
    return result


# What belongs to a rank alone.


def _same(making: _Making, ranks: Sequence[Leaf]) -> bool:
    kinds = {(leaf.dtype, leaf.kind, leaf.shape) for leaf in ranks}
    return len(kinds) == 1 and len({making.digest(n, leaf) for n, leaf in enumerate(ranks)}) == 1


def _apart(making: _Making, ranks: Sequence[Leaf]) -> str:
    """Say between which ranks a leaf differs."""
    facts = [(leaf.dtype, leaf.shape, making.digest(n, leaf)) for n, leaf in enumerate(ranks)]
    other = next(n for n, fact in enumerate(facts) if fact != facts[0])
    return f"differs from rank to rank (0 and {other}, for example)"


# Random generators.


def _generators(making: _Making, name: str, ranks: Sequence[Section]) -> None:
    """Generator by generator: rule 4."""
    trees = [section.tree for section in ranks]
    if not all(isinstance(tree, dict) for tree in trees):
        making.refused[name] = f"{name}: generators are a dict of states by name, and here they are not"
        return
    tree: dict[Any, Node] = {}
    leaves: list[Leaf] = []
    for key in dict.fromkeys(key for one in trees for key in one):
        prints = [_print(making, n, section, key) for n, section in enumerate(ranks)]
        if len(set(prints)) > 1 and making.new:
            tree[key] = {SEED: seed_of(f"{name}/{key}", prints[0], making.rank)}
        elif key in trees[making.own]:
            tree[key] = _moved(making, making.own, ranks[making.own], trees[making.own][key], leaves)
    making.add(ranks[0], tree, leaves)


def seed_of(name: str, state: str, rank: int) -> int:
    """Return the seed (63 bits) of a generator of a rank that was not there, from what rank 0's held."""
    return int(checksum(f"{name} {state} {rank}".encode()), 16) >> 1


def _print(making: _Making, rank: int, section: Section, key: Any) -> str:
    """A text by which a generator's state is told from another."""
    node = section.tree.get(key)
    digests = [making.digest(rank, section.leaves[ref.leaf]) for ref in refs(node)]
    return f"{printed(mapped(node, lambda _: None))} {' '.join(digests)}"


def _moved(making: _Making, rank: int, section: Section, node: Node, leaves: list[Leaf]) -> Node:
    """Take a part of a rank's tree as it is, its leaves with it."""

    def take(ref: Ref) -> Ref:
        making.take(rank, section.leaves[ref.leaf])
        leaves.append(replace(section.leaves[ref.leaf], alias_of=None))
        return Ref(len(leaves) - 1)

    return mapped(node, take)


# The position in the data.


def _position(making: _Making, name: str, ranks: Sequence[Section], holds: Set[str]) -> None:
    if holds and not contains(ranks[0].tree, holds):
        making.refused[name] = (
            f"{name} was saved with a position that counts for each rank alone (none of everstep.data.GlobalSampler is "
            "in its state)"
        )
        return
    seeds: dict[int, list[int]] = {}
    plain = [without(section.tree, _WORKER_SEEDS, seeds.setdefault(n, [])) for n, section in enumerate(ranks)]
    others = [replace(section, tree=tree, text=None) for section, tree in zip(ranks, plain, strict=True)]
    where = difference(others)
    if where is None:
        apart = [leaf for n, leaf in enumerate(ranks[0].leaves) if not _same(making, [s.leaves[n] for s in ranks])]
        where = f"{apart[0].path} differs from rank to rank" if apart else None
    if where is not None:
        making.refused[name] = f"{where}: the ranks do not stand at one position in the data"
        return
    taken = ranks[making.own]
    seed = partial(_seed_of_workers, name, str(seeds[0]), making.rank)
    _own(making, replace(taken, tree=seeded(taken.tree, _WORKER_SEEDS, seed), text=None) if making.new else taken)


def _own(making: _Making, section: Section) -> None:
    """Take a section as the rank of our number, or the one that stands for it, has saved it."""
    for leaf in section.leaves:
        making.take(making.own, leaf)
    making.add(section, section.tree, [replace(leaf, alias_of=None) for leaf in section.leaves])


def _seed_of_workers(name: str, state: str, rank: int, key: str) -> int:
    return seed_of(f"{name}/{key}", state, rank)
