"""The plan takes the newest whole step of the living line; three rotating buffers always leave one (E15)."""

import random
from dataclasses import dataclass, field

import pytest

from everstep.checkpoint.core.plan import Branch, Committed, Plan, Sealed, choose, living
from everstep.checkpoint.core.rotation import ROTATING, Slot, grants
from everstep.checkpoint.core.rotation import choose as choose_buffer

FIRST = Branch(0, 0, -1)


def sealed(rank: int, buffer: int, step: int, generation: int = 0, parent: int = -1, world: int = 2) -> Sealed:
    return Sealed(rank, buffer, step, 0, generation, parent, world)


def test_the_newest_step_of_all_ranks_is_taken_and_newer_ones_are_void():
    held = [sealed(0, 0, 3), sealed(0, 1, 4), sealed(0, 2, 5), sealed(1, 0, 3), sealed(1, 1, 4)]
    plan = choose(2, held, [FIRST])
    assert (plan.step, plan.tier, plan.sources, plan.void) == (4, "memory", {0: 1, 1: 1}, ((0, 2),))
    assert plan.reason == ("step 4 from memory: the newest that all 2 ranks hold, of lineage 0.0; step 5 is not whole")


def test_nothing_anywhere_is_the_beginning():
    plan = choose(2, [], [])
    assert plan == Plan(None, None, "from the beginning: memory holds no snapshot; no older tier has one")
    assert plan.parent == -1


def test_an_older_tier_serves_where_memory_is_not_whole_or_is_older():
    disk = [Committed(20, "disk", {"path": "a"}), Committed(10, "disk")]
    lost = choose(3, [sealed(0, 0, 25, world=3), sealed(2, 0, 25, world=3)], [FIRST], disk)
    assert (lost.step, lost.tier, lost.committed, lost.sources) == (20, "disk", disk[0], {})
    assert lost.reason == "step 20 from disk: memory holds no snapshot of rank 1"
    assert lost.void == ((0, 0), (2, 0))
    stale = choose(1, [sealed(0, 0, 15, world=1)], [FIRST], disk)
    assert stale.reason == "step 20 from disk: newer than step 15, the newest whole one in memory"
    assert stale.void == ()  # still an ancestor
    equal = choose(1, [sealed(0, 0, 20, world=1)], [FIRST], disk)
    assert equal.tier == "memory"


def test_steps_of_two_lineages_are_never_combined():
    """M3: generation 0 made step 101 on rank 0 only; generation 1 went back to 100 and made its own on rank 1."""
    branches = [FIRST, Branch(0, 1, 100)]
    held = [
        sealed(0, 0, 100), sealed(1, 0, 100),
        sealed(0, 1, 101), sealed(1, 1, 101, generation=1, parent=100),
    ]  # fmt: skip
    plan = choose(2, held, branches)
    assert plan.step == 100
    assert (0, 1) in plan.void


def test_what_no_generation_of_this_run_made_does_not_count():
    assert not living(sealed(0, 0, 3, generation=5), [FIRST])
    assert not living(sealed(0, 0, 3, parent=2), [FIRST])
    assert not living(sealed(0, 0, 3), [])
    assert living(sealed(0, 0, 3), [FIRST, Branch(0, 1, 3)])
    assert not living(sealed(0, 0, 4), [FIRST, Branch(0, 1, 3)])
    assert not living(sealed(0, 0, 3), [FIRST, Branch(0, 1, 3), Branch(1, 0, 2)])


def test_a_world_of_another_size_does_not_count():
    assert choose(2, [sealed(0, 0, 3, world=3), sealed(1, 0, 3, world=3)], [FIRST]).step is None


def test_what_was_struck_out_does_not_exist():
    held = [sealed(r, s % 3, s) for r in (0, 1) for s in (3, 4)]
    plan = choose(2, held, [FIRST], struck={(1, 1)})
    assert plan.step == 3
    assert (1, 1) in plan.void


def test_ranks_that_ran_apart_are_told_so():
    plan = choose(2, [sealed(0, 0, 3), sealed(1, 0, 9)], [FIRST])
    assert "newest: step 3 on rank 0, step 9 on rank 1" in plan.reason


def test_rotation_takes_void_then_oldest_and_never_a_held_one():
    slots = [Slot(0, 7), Slot(1, 8), Slot(2, 0), Slot(3, 6)]
    assert choose_buffer(slots) == 2
    assert choose_buffer(slots, {2}) == 3
    assert choose_buffer(slots, {0, 1, 2, 3}) is None
    assert grants(4, set(), 1)
    assert not grants(4, {0}, 1)
    assert grants(4, {0}, 0)
    assert ROTATING == 3


# A world of ranks that meet once a step. The copy of step k runs beside step k+1 and must be whole before this rank's
# own update of k+1, not before its reduction: a peer that has finished k+1 may be two snapshots ahead.


@dataclass
class Rank:
    number: int
    step: int = 0  # done
    entered: int = 0  # reductions entered
    copying: int | None = None  # buffer
    sequence: int = 0
    slots: dict[int, int] = field(default_factory=dict)  # buffer -> sequence; 0: void
    kept: dict[int, Sealed] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)


class World:
    def __init__(self, seed: int, ranks: int, buffers: int) -> None:
        self.rng = random.Random(seed)
        self.ranks = [Rank(n, slots=dict.fromkeys(range(buffers), 0)) for n in range(ranks)]
        self.branches = [FIRST]
        self.made: dict[tuple[int, int], int] = {}

    def moves(self, alive: set[int]) -> list[tuple[str, Rank]]:
        found: list[tuple[str, Rank]] = []
        for rank in (r for r in self.ranks if r.number in alive):
            if rank.copying is not None:
                found.append(("seal", rank))
            if rank.entered == rank.step:
                found.append(("enter", rank))
            elif all(r.entered > rank.step for r in self.ranks) and rank.copying is None:
                found.append(("finish", rank))
        return found

    def do(self, move: str, rank: Rank) -> None:
        if move == "enter":
            rank.entered += 1
        elif move == "seal":
            self.seal(rank)
        else:
            rank.step += 1
            self.take(rank)

    def take(self, rank: Rank) -> None:
        buffer = choose_buffer([Slot(b, s) for b, s in rank.slots.items()], rank.busy)
        assert buffer is not None
        rank.sequence += 1
        rank.slots[buffer], rank.copying = rank.sequence, buffer
        rank.kept.pop(buffer, None)

    def seal(self, rank: Rank) -> None:
        assert rank.copying is not None
        at = self.branches[-1]
        rank.kept[rank.copying] = Sealed(
            rank.number, rank.copying, rank.step, at.epoch, at.generation, at.parent, len(self.ranks)
        )
        rank.copying = None

    def run_until_killed(self) -> Plan:
        alive = set(range(len(self.ranks)))
        for _ in range(self.rng.randrange(10, 60)):
            self.do(*self.rng.choice(self.moves(alive)))
        dead = self.rng.randrange(len(self.ranks))
        alive.discard(dead)
        for _ in range(self.rng.randrange(12)):
            if moves := self.moves(alive):
                self.do(*self.rng.choice(moves))
        for rank in self.ranks:  # survivors' copies end, the dead one's is torn
            if rank.copying is not None and rank.number != dead and self.rng.random() < 0.5:
                self.seal(rank)
        held = [s for r in self.ranks for s in r.kept.values()]
        return choose(len(self.ranks), held, self.branches)

    def roll_back(self, plan: Plan) -> None:
        self.branches.append(Branch(0, len(self.branches), plan.parent))
        for rank in self.ranks:
            rank.copying = None
            rank.step = rank.entered = plan.step or 0
            for buffer in rank.slots:
                if (rank.number, buffer) in plan.void or buffer not in rank.kept:
                    rank.slots[buffer] = 0
                    rank.kept.pop(buffer, None)


def no_common_step(buffers: int, seeds: int, busy: int = 0) -> int:
    lost = 0
    for seed in range(seeds):
        world = World(seed, 4, buffers)
        for rank in world.ranks:
            rank.busy = set(range(busy))
            world.take(rank)
            world.seal(rank)
        lost += world.run_until_killed().step is None
    return lost


def test_three_buffers_always_leave_a_common_step_and_two_do_not():
    assert no_common_step(3, 400) == 0
    assert no_common_step(2, 400) > 0


def test_a_slow_reader_needs_a_buffer_of_its_own():
    assert no_common_step(4, 250, busy=1) == 0
    assert no_common_step(3, 150, busy=1) > 0


@pytest.mark.long
def test_three_buffers_leave_a_common_step_at_every_kill_of_twenty_thousand():
    assert no_common_step(3, 20_000) == 0


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_over_many_faults_at_most_one_step_is_lost_and_lineages_never_mix(ranks):
    for seed in range(60):
        world = World(seed, ranks, 3)
        for rank in world.ranks:
            world.take(rank)
            world.seal(rank)
        for _ in range(4):
            plan = world.run_until_killed()
            whole = min(r.step for r in world.ranks)
            assert plan.step is not None
            assert plan.step >= whole - 1
            used = {(r, b): s for r in range(ranks) for b, s in world.ranks[r].kept.items()}
            chosen = [used[pair] for pair in plan.sources.items()]
            assert len({(s.step, s.epoch, s.generation, s.parent) for s in chosen}) == 1
            assert len(chosen) == ranks
            world.roll_back(plan)
            assert all(s.step <= plan.step for r in world.ranks for s in r.kept.values())


@pytest.mark.long
def test_two_buffers_lose_every_step_at_some_kills():
    assert 0.001 < no_common_step(2, 5_000) / 5_000 < 0.2
