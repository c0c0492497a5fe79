"""Shelves of several nodes: whatever each holds, all begin from one step, and each voids its own buffers alone."""

import random

from everstep.checkpoint.core.segment import FROM_THE_BEGINNING
from everstep.checkpoint.told_shelf import ToldShelf
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.testing.loopback import LoopbackHost


class OnNode(LoopbackHost):
    def __init__(self, companion, node, size):
        self.node = node
        super().__init__(companion, size)


class Held(ToldShelf):
    """A shelf whose buffers are rows."""

    def __init__(self, rows):
        super().__init__(readers=0)
        self.rows, self.voided = rows, []

    def telling(self):
        return {"sealed": [list(row) for row in self.rows], "struck": sorted(list(one) for one in self._struck)}

    def _void(self, rank, buffer):
        if self._homes.get(rank) == self._node:
            self.voided.append((rank, buffer))


def roster(homes, generation=1):
    members = tuple(
        Member(rank, Incarnation(node, rank, 1), node, rank, False, "kept") for rank, node in enumerate(homes)
    )
    return Roster(0, generation, members)


def world(rows, homes, gone=(), struck=()):
    """Shelves that began generation 0 from the beginning, and have told one another what they hold."""
    nodes = sorted(set(homes) | set(rows))
    shelves = {node: Held(rows.get(node, [])) for node in nodes}
    for node, shelf in shelves.items():
        OnNode(shelf, node, len(homes))
        shelf.on_nodes(dict.fromkeys(nodes, "a"))
        shelf.on_roster(roster(homes, 0))
        shelf.voided.clear()
    for node, one in struck:
        shelves[node]._struck.add(one)
    for node in nodes:
        if node not in gone:
            told = shelves[node].telling()
            for shelf in shelves.values():
                shelf.told(node, told)
    return {node: shelf for node, shelf in shelves.items() if node not in gone}


def row(rank, buffer, step, size=2):
    return [rank, buffer, step, 0, 0, FROM_THE_BEGINNING, size]


TWO = {"a": [row(0, 0, 4), row(0, 1, 5)], "b": [row(1, 0, 4), row(1, 1, 3)]}


def enter(shelves, homes):
    return {node: shelf.on_roster(roster(homes)) for node, shelf in shelves.items()}


def test_all_begin_from_the_newest_step_that_all_ranks_have_on_their_own_nodes():
    shelves = world(TWO, ["a", "b"])
    told = enter(shelves, ["a", "b"])
    assert told["a"] == told["b"]
    assert [told["a"][rank]["restore"] for rank in (0, 1)] == [
        {"step": 4, "tier": "memory", "buffer": 0},
        {"step": 4, "tier": "memory", "buffer": 0},
    ]
    assert (shelves["a"].voided, shelves["b"].voided) == ([(0, 1)], [])


def test_a_rank_that_stands_elsewhere_now_makes_all_begin_again():
    """What its old node holds lies where nobody can hand it out; the same number of a buffer here is another buffer."""
    rows = TWO | {"a": [*TWO["a"], row(1, 0, 4)]}
    told = enter(world(TWO, ["a", "b"]), ["a", "a"])
    assert told["a"] == told["b"]
    assert told["a"][0]["restore"] is None
    told = enter(world(rows, ["a", "b"]), ["a", "a"])
    assert told["a"][1]["restore"] == {"step": 4, "tier": "memory", "buffer": 0}


def test_what_a_lost_node_held_is_lost_for_all():
    shelves = world(TWO, ["a", "b"], gone=["b"])
    told = enter(shelves, ["a", "a"])
    assert [told["a"][rank]["restore"] for rank in (0, 1)] == [None, None]
    shelves = world(TWO, ["a", "b"])
    for shelf in shelves.values():
        shelf.on_nodes({"a": "a"})  # it had told, and was gone before the roster
    assert enter(shelves, ["a", "b"])["a"][0]["restore"] is None


def test_what_one_node_could_not_read_does_not_exist_for_the_other():
    told = enter(world(TWO, ["a", "b"], struck=[("b", (1, 0))]), ["a", "b"])
    assert told["a"] == told["b"]
    assert told["a"][0]["restore"] is None


def test_nothing_that_was_told_serves_twice():
    shelves = world(TWO, ["a", "b"])
    enter(shelves, ["a", "b"])
    assert shelves["a"].on_roster(roster(["a", "b"], 2))[0]["restore"] is None


def test_memory_is_judged_for_the_ranks_of_this_node():
    shelf = ToldShelf(cap_bytes=10 << 20, readers=0)
    OnNode(shelf, "a", 8)
    shelf.on_roster(roster(["a", "a", *["b"] * 6], 0))
    assert shelf._refusal(0, 1 << 20) is None  # two ranks here, not eight
    assert shelf._refusal(0, 2 << 20) is not None


def test_any_holdings_give_one_answer_on_all_nodes_and_never_a_mixture():
    for seed in range(2000):
        rng = random.Random(seed)
        nodes = ["a", "b", "c"][: rng.randint(2, 3)]
        size = rng.randint(2, 4)
        homes = [rng.choice(nodes) for _ in range(size)]
        rows = {
            node: [
                row(rank, n, rng.randint(1, 4), size) for rank in range(size) for n in range(3) if rng.random() < 0.6
            ]
            for node in nodes
        }
        shelves = world(rows, homes)
        told = enter(shelves, homes)
        (answer,) = {str(one) for one in told.values()}
        first = next(iter(told.values()))
        steps = {one["restore"]["step"] if one["restore"] else None for one in first.values()}
        assert len(steps) == 1, (seed, answer)
        if steps != {None}:
            for rank, one in first.items():
                assert row(rank, one["restore"]["buffer"], one["restore"]["step"], size) in rows[homes[rank]], seed
