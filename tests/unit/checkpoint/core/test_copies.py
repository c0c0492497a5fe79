"""From whose copies several nodes begin: the nearest, whole, unstruck, of the newest step that all have."""

import random

import pytest

from everstep.checkpoint.core.copies import Copy, Place, alive, decide, merged
from everstep.checkpoint.core.plan import MEMORY, Branch, Committed, Sealed

LINE = [Branch(0, 0, -1)]
HOMES = {0: "a", 1: "a", 2: "b", 3: "b"}


def copy(node, rank, step, *, replica=False, number=0, generation=0, parent=-1, world=4, age=0.0):
    return Copy(node, replica, Sealed(rank, number, step, 0, generation, parent, world), 100, age)


def own(step, ranks=HOMES):
    return [copy(HOMES[rank], rank, step) for rank in ranks]


def test_every_rank_takes_the_nearest_copy():
    everywhere = [
        *own(7),
        copy("b", 0, 7, replica=True, number=5),
        copy("a", 2, 7, replica=True, number=6),
        copy("a", 3, 7, number=9),
    ]
    found = decide(HOMES, everywhere, LINE)
    assert found.plan.step == 7
    assert {r: (c.node, c.replica) for r, c in found.sources.items()} == {r: (n, False) for r, n in HOMES.items()}
    moved = decide({0: "a", 1: "a", 2: "a", 3: "a"}, everywhere, LINE)  # b has only lost its workers
    assert [(c.node, c.replica) for c in moved.sources.values()] == [
        ("a", False), ("a", False), ("a", True), ("a", False)
    ]  # fmt: skip


def test_a_lost_node_s_ranks_begin_from_their_replicas_with_all_others_at_that_step():
    copies = [
        copy("a", 0, 9), copy("a", 1, 9), copy("a", 0, 8), copy("a", 1, 8),
        copy("a", 2, 8, replica=True, number=1, age=0.5), copy("c", 3, 8, replica=True, number=2, age=1.5),
    ]  # fmt: skip
    found = decide({0: "a", 1: "a", 2: "c", 3: "c"}, copies, LINE)
    assert (found.plan.step, found.plan.tier) == (8, MEMORY)
    assert {r: (c.node, c.replica) for r, c in found.sources.items()} == {
        0: ("a", False), 1: ("a", False), 2: ("a", True), 3: ("c", True)
    }  # fmt: skip
    assert "rank 2 from the copy that node a keeps, 0.5 s old" in found.plan.reason
    assert "rank 3 from the copy that node c keeps, 1.5 s old" in found.plan.reason
    assert found.from_peers


def test_memory_that_was_left_on_another_node_is_taken_and_said():
    found = decide({0: "a", 1: "a", 2: "a", 3: "b"}, own(4), LINE)
    assert (found.sources[2].node, found.sources[2].replica) == ("b", False)
    assert "rank 2 from its own memory, left on node b" in found.plan.reason
    assert not found.from_peers


def test_what_is_struck_out_is_not_taken_and_what_takes_its_place_is():
    copies = [*own(3), *own(4), copy("b", 0, 4, replica=True, number=7)]
    at_home = copies[4].place
    assert at_home == Place("a", False, 0, 0, 4, 0, 0)
    found = decide(HOMES, copies, LINE, struck={at_home})
    assert (found.plan.step, found.sources[0].node) == (4, "b")
    both = {at_home, copies[-1].place}
    assert decide(HOMES, copies, LINE, struck=both).plan.step == 3
    later = [*own(5), copy("b", 0, 5, replica=True, number=7)]
    assert decide(HOMES, later, LINE, struck=both).plan.step == 5


def test_replicas_of_a_line_that_was_left_are_never_combined_with_it():
    """M3: generation 0 went to step 6, generation 1 began from 4 and made its own 5 and 6."""
    line = [Branch(0, 0, -1), Branch(0, 1, 4)]
    copies = [
        copy("b", 0, 6, replica=True, number=1), copy("a", 0, 5, generation=1, parent=4),
        copy("a", 1, 6, generation=1, parent=4), copy("a", 1, 5, generation=1, parent=4),
    ]  # fmt: skip
    copies = [Copy(c.node, c.replica, Sealed(*_resized(c.snapshot, 2))) for c in copies]
    found = decide({0: "a", 1: "a"}, copies, line)
    assert (found.plan.step, found.sources[0].snapshot.generation) == (5, 1)
    assert not alive(copies[0].snapshot, line)


def _resized(s, world):
    return s.rank, s.buffer, s.step, s.epoch, s.generation, s.parent, world


def test_newest_first_over_all_tiers_and_memory_first_of_equal_steps():
    disk = Committed(8, "disk", {"path": "x"})
    assert decide(HOMES, own(7), LINE, [disk]).plan.tier == "disk"
    assert decide(HOMES, own(8), LINE, [disk]).plan.tier == MEMORY
    assert decide(HOMES, own(8, [0, 1, 2]), LINE, [disk]).plan.tier == "disk"
    assert decide(HOMES, [], LINE).plan.step is None


def test_state_of_a_larger_world_is_taken_where_every_node_has_room_for_all_of_it_and_else_refused_by_name():
    copies = [*own(5, [0, 1]), copy("a", 2, 5, replica=True), copy("a", 3, 5, replica=True)]
    found = decide({0: "a", 1: "a"}, copies, LINE)
    assert (found.plan.step, found.plan.saved_by, sorted(found.sources)) == (5, 4, [0, 1, 2, 3])
    spread = decide({0: "a", 1: "c"}, copies, LINE, room={"a": 0, "c": 400})
    assert (spread.plan.step, spread.plan.saved_by, sorted(spread.sources)) == (5, 4, [0, 1, 2, 3])
    short = decide({0: "a", 1: "c"}, copies, LINE, room={"a": 0, "c": 399})
    assert short.plan.step is None
    assert "step 5 in memory is of 4 ranks" in short.plan.unfit
    assert "node c has no room for all of step 5" in short.plan.reason
    same = decide(HOMES, [copy("c", rank, 5) for rank in HOMES], LINE, room={"a": 0, "b": 0})
    assert same.plan.step == 5, "its own part alone a rank must have"


def test_cl_20_the_newest_step_in_the_intersection_of_what_is_whole():
    homes = {0: "a", 1: "b", 2: "c"}

    def have(*rows):
        return [copy(homes[rank], rank, step, world=3, number=n) for n, (rank, step) in enumerate(rows)]

    copies = have((0, 30), (0, 40), (1, 20), (1, 30), (2, 20), (2, 40), (2, 30))
    bad = {copies[-1].place}
    assert decide(homes, copies, LINE).plan.step == 30
    assert decide(homes, copies, LINE, struck=bad).plan.step is None
    older = [Committed(10, "disk", {})]
    assert decide(homes, copies, LINE, older, struck=bad).plan.step == 10
    replica = copy("a", 2, 30, replica=True, number=9, world=3)
    assert decide(homes, [*copies, replica], LINE, struck=bad).sources[2] == replica  # a spare with nothing gets it
    assert decide(homes, have((0, 40), (1, 30)), LINE).plan.step is None


@pytest.mark.parametrize("seed", range(120))
def test_any_facts_one_step_of_one_lineage_for_all_and_the_newest_that_there_is(seed):
    draw = random.Random(seed)
    nodes = ["a", "b", "c"][: draw.randint(1, 3)]
    size = draw.randint(1, 4)
    homes = {rank: draw.choice(nodes) for rank in range(size)}
    line = [Branch(0, 0, -1), Branch(0, 1, draw.randint(-1, 5))][: draw.randint(1, 2)]
    copies = []
    for number in range(draw.randint(0, 30)):
        generation = draw.randrange(2)
        parent = -1 if generation == 0 else line[-1].parent
        where = draw.choice(nodes)
        copies.append(copy(where, draw.randrange(size), draw.randint(0, 8), replica=draw.random() < 0.5, number=number,
                           generation=generation, parent=parent, world=size))  # fmt: skip
    struck = {c.place for c in copies if draw.random() < 0.1}
    found = decide(homes, copies, line, struck=struck)
    good = [c for c in copies if c.place not in struck and alive_at(c, line)]
    wholes = {
        (c.snapshot.step, c.snapshot.generation)
        for c in good
        if {o.snapshot.rank for o in good if same(o, c)} == set(homes)
    }
    if not wholes:
        assert found.plan.step is None
        return
    chosen = {(c.snapshot.step, c.snapshot.generation) for c in found.sources.values()}
    assert chosen == {max(wholes)}
    assert sorted(found.sources) == sorted(homes)
    for rank, source in found.sources.items():
        assert source in good
        near = [c for c in good if c.snapshot.rank == rank and same(c, source)]
        assert far(source, homes) == min(far(c, homes) for c in near)


def alive_at(c, line):
    return alive(c.snapshot, line, plan=type("Any", (), {"parent": 99})())


def same(one, other):
    a, b = one.snapshot, other.snapshot
    return (a.step, a.generation) == (b.step, b.generation)


def far(c, homes):
    return (c.node != homes[c.snapshot.rank], c.replica)


def test_what_nodes_know_of_generations_is_put_together_in_order():
    assert merged([[[0, 1, 4], [0, 0, -1]], [[0, 2, 5], [0, 1, 4]], []]) == [
        Branch(0, 0, -1), Branch(0, 1, 4), Branch(0, 2, 5)
    ]  # fmt: skip


def test_a_row_comes_back_and_nonsense_does_not():
    one = copy("a", 2, 7, replica=True, number=3, age=1.25)
    assert Copy.from_row("a", one.to_row()) == one
    for row in ([], [True], ["x"] * 10, [True, "one", 0, 0, 0, 0, 0, 0, 0, 0], None):
        with pytest.raises((ValueError, TypeError)):
            Copy.from_row("a", row)
