"""The plan takes the newest whole step of the living line; three rotating buffers always leave one (E15)."""

import random
from dataclasses import dataclass, field

import pytest

from everstep.checkpoint.core.plan import PATIENCE, Branch, Committed, Plan, Sealed, choose, living
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


def test_a_world_of_another_size_counts_with_all_of_its_ranks_alone():
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


# A world of another size.


def test_state_of_more_ranks_is_taken_where_all_who_kept_it_can_be_had():
    held = [sealed(rank, 7 + rank, 25, world=3) for rank in range(3)]
    disk = [Committed(20, "disk", {"path": "a"}, 3)]
    plan = choose(2, held, [FIRST], disk)
    assert (plan.step, plan.tier, plan.saved_by, plan.sources) == (25, "memory", 3, {0: 7, 1: 8, 2: 9})
    assert plan.reason == ("step 25 from memory: the newest that all 3 ranks hold, of lineage 0.0; 2 ranks take it up")
    assert (plan.unfit, plan.void) == ("", ())
    assert choose(3, held, [FIRST], disk).reason.endswith("of lineage 0.0")


def test_a_rank_s_part_that_is_lost_is_no_state_and_the_plan_says_so():
    held = [sealed(0, 0, 25, world=3), sealed(2, 0, 25, world=3)]
    nothing = choose(2, held, [FIRST])
    assert (nothing.step, nothing.unfit) == (None, "step 25 in memory is of 3 ranks"), "never the beginning, silently"
    plan = choose(2, held, [FIRST], [Committed(20, "disk", {}, 3)])
    assert (plan.step, plan.saved_by) == (20, 3)
    assert plan.reason == (
        "step 20 from disk: memory holds no snapshot of rank 1 of 3; it was saved by 3 ranks, and 2 ranks take it up"
    )


def test_where_nobody_can_hand_out_the_others_parts_such_state_does_not_count():
    held = [sealed(rank, 0, 25, world=3) for rank in range(3)]
    unable = frozenset({"memory"})
    assert choose(2, held, [FIRST], unable=unable).unfit == "step 25 in memory is of 3 ranks"
    plan = choose(2, held, [FIRST], [Committed(10, "disk", {"path": "b"}, 2)], unable=unable)
    assert (plan.step, plan.tier) == (10, "disk")
    assert "step 25 in memory is of 3 ranks" in plan.reason
    assert plan.void == ((0, 0), (1, 0), (2, 0))


def test_a_newer_checkpoint_of_another_size_comes_before_an_older_one_of_this_size():
    disk = [Committed(20, "disk", {"path": "a"}, 4), Committed(10, "disk", {"path": "b"}, 2)]
    assert choose(2, [], [], disk).committed == disk[0]
    equal = [Committed(20, "disk", {"path": "a"}, 4), Committed(20, "peer", {"path": "b"}, 2)]
    assert choose(2, [], [], equal).committed == equal[1]


def test_of_equal_steps_the_present_size_is_taken():
    """The world of two has sealed in its own form what it took over; a rank of it died before its first step."""
    branches = [FIRST, Branch(0, 1, 25)]
    old = [sealed(rank, 0, 25, world=3) for rank in range(3)]
    new = [sealed(rank, 5, 25, generation=1, parent=25) for rank in range(2)]
    plan = choose(2, [*old, *new], branches)
    assert (plan.saved_by, plan.sources) == (2, {0: 5, 1: 5})
    half = choose(2, [*old, new[0]], branches)
    assert (half.saved_by, half.sources) == (3, {0: 0, 1: 0, 2: 0})
    assert choose(1, [*old, *new], branches).saved_by in (2, 3)


def test_where_no_step_was_done_nothing_is_lost_with_a_world():
    held = [sealed(rank, 0, 0, world=3) for rank in range(3)]
    assert choose(2, held, [FIRST]).saved_by == 3
    assert choose(2, held[:2], [FIRST]).unfit == ""


@pytest.mark.parametrize("seed", range(30))
def test_worlds_that_grow_and_shrink_never_combine_what_does_not_belong_together(seed):
    """Each generation trains some steps in a world of another size, seals as it goes, and loses some buffers."""
    rng, branches, held = random.Random(seed), [], []
    progress = -1
    for generation in range(12):
        world = rng.randint(1, 4)
        disk = [Committed(step, "disk", {}, rng.randint(1, 4)) for step in rng.sample(range(40), 1)]
        disk = [c for c in disk if c.step <= progress]
        plan = choose(world, held, branches, disk)
        if plan.tier == "memory":
            chosen = [s for s in held if plan.sources.get(s.rank) == s.buffer]
            assert {s.rank for s in chosen} == set(range(plan.saved_by))
            assert {(s.step, s.world_size) for s in chosen} == {(plan.step, plan.saved_by)}
            assert len({(s.epoch, s.generation, s.parent) for s in chosen}) == 1
        elif plan.tier == "disk":
            assert plan.saved_by == plan.committed.world_size
        held = [s for s in held if (s.rank, s.buffer) not in plan.void]
        branches.append(Branch(0, generation, plan.parent))
        begin = progress = max(plan.parent, 0)
        for step in range(begin + 1, begin + 1 + rng.randint(0, 4)):
            for rank in range(world):
                buffer = generation * 100 + step % 4
                held = [s for s in held if (s.rank, s.buffer) != (rank, buffer)]
                held.append(sealed(rank, buffer, step, generation, plan.parent, world))
            progress = step
        held = [s for s in held if rng.random() > 0.1]


# A state that nobody gets away from (CL-17).


def again(count: int, parent: int) -> list[Branch]:
    return [FIRST, *[Branch(0, n + 1, parent) for n in range(count)]]


def test_a_state_in_memory_from_which_nobody_comes_further_is_left_for_a_durable_one():
    held = [sealed(rank, 0, 25) for rank in range(2)]
    disk = [Committed(20, "disk", {"path": "a"}, 2)]
    assert choose(2, held, again(PATIENCE - 1, 25), disk).tier == "memory"
    plan = choose(2, held, again(PATIENCE, 25), disk)
    assert (plan.step, plan.tier, plan.void) == (20, "disk", ((0, 0), (1, 0)))
    assert plan.reason.endswith(
        "step 25 in memory is suspected: 4 generations in a row began from it and came no further"
    )


def test_without_a_durable_one_an_older_one_in_memory_is_taken_and_the_last_one_stays():
    held = [sealed(rank, buffer, step) for rank in range(2) for buffer, step in enumerate((24, 25))]
    plan = choose(2, held, again(PATIENCE, 25))
    assert (plan.step, plan.sources) == (24, {0: 0, 1: 0})
    last = choose(2, [sealed(rank, 0, 25) for rank in range(2)], again(PATIENCE + 3, 25))
    assert last.step == 25, "the budget of restarts ends it"


def test_progress_between_faults_is_no_suspicion():
    held = [sealed(rank, 0, 26, generation=5, parent=25) for rank in range(2)]
    branches = [*again(4, 25), Branch(0, 5, 25)]
    assert choose(2, held, branches, [Committed(20, "disk", {}, 2)]).step == 26


@pytest.mark.parametrize(
    ("inventory", "step"),
    [
        ({0: {30, 40}, 1: {20, 30}, 2: {20, 40, 30}}, 30),
        ({0: {30, 40}, 1: {20, 30}, 2: {20, 40}}, None),  # 30 of rank 2 is bad
        ({0: {40}, 1: {30}, 2: {30, 40}}, None),
        ({0: {30}, 1: {30}, 2: set()}, None),
    ],
)
def test_the_newest_in_the_intersection_not_the_least_of_the_latest(inventory, step):
    """CL-20. Where there is none, the durable one."""
    held = [sealed(rank, at, at, world=3) for rank, steps in inventory.items() for at in steps]
    plan = choose(3, held, [FIRST], [Committed(10, "disk", {}, 3)])
    assert (plan.step, plan.tier) == ((step, "memory") if step else (10, "disk"))
