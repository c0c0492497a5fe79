"""What a plain loop saves: one number for all ranks, a fate for each, whatever is slow, late, killed or gone."""

import errno
import os
import random
from collections import deque
from types import SimpleNamespace

import pytest

from everstep.checkpoint.core import commit, rotation
from everstep.checkpoint.core.plan import MEMORY, Plan, Sealed
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.ondemand import OnDemand
from everstep.checkpoint.restoring import Restoring
from everstep.checkpoint.snapshot import Taken
from everstep.checkpoint.tier_client import TierClient
from everstep.clock import SystemClock
from everstep.testing.disk_bench import BUFFERS, BenchShelf, DiskBench
from everstep.testing.disks import HostileFiles, UnsyncedFiles, Wound
from everstep.testing.states import rank_state, snapshot


class Shelf(BenchShelf):
    """Buffers as ranks fill them; a hold is the rank's and the agent's."""

    released = staticmethod(lambda rank, buffer: None)

    def __init__(self, *args, **rest):
        super().__init__(*args, **rest)
        self.offers = set()  # rank, buffer, hold

    def hold(self, rank, buffer, offer=0):
        super().hold(rank, buffer)
        self.offers.discard((rank, buffer, offer))

    def release(self, rank, buffer, offer=0):
        if offer:
            self.offers.discard((rank, buffer, offer))
        else:
            super().release(rank, buffer)
        if (rank, buffer) not in self.held | {each[:2] for each in self.offers}:
            self.released(rank, buffer)

    def fill(self, rank, buffer, step, generation, sequence):
        self.drop(rank, buffer)
        fd = snapshot(rank_state(rank, self.world_size, step), step, generation=generation, sequence=sequence)
        parent = self.plan.parent if self.plan else -1
        self.buffers[rank, buffer] = fd, Sealed(rank, buffer, step, 0, generation, parent, self.world_size)


class Rank:
    """One rank: a rotation of buffers as `Snapshotter` has it, and the real client. Messages travel when told."""

    def __init__(self, bench, rank):
        self.bench, self.rank = bench, rank
        self.sequences = dict.fromkeys(range(BUFFERS), 0)
        self.count = self.number = self.holds = 0
        self.open = {}  # buffer → holds
        self.inbox, self.outbox = deque(), deque()
        self.fates = {}
        self.client = TierClient("disk", self.outbox.append, self, self, told=True)

    # as Snapshotter

    def keep(self, buffer, sequence):
        if self.sequences[buffer] != sequence or not rotation.grants(BUFFERS, self.held, buffer):
            return 0
        self.holds += 1
        self.open.setdefault(buffer, set()).add(self.holds)
        self.outbox.append({"kind": "snapshot.hold", "buffer": buffer, "hold": self.holds})
        return self.holds

    def release(self, buffer, heard):
        self.open[buffer] = {hold for hold in self.open.get(buffer, ()) if hold > heard}

    def forgo(self, buffer, hold):
        self.open[buffer].discard(hold)

    @property
    def held(self):
        return {buffer for buffer, holds in self.open.items() if holds}

    # as Book

    def settle(self, number, step, what, text, *, alone):
        for each in range(1, number + 1):
            if each == number or not alone:
                self.fates.setdefault(each, (what if each == number else f"{what} by {step}", text))

    # the loop

    def save(self, step, *, due=True, metrics=None):
        slots = [rotation.Slot(b, s) for b, s in self.sequences.items()]
        buffer = rotation.choose(slots, self.held)
        assert buffer is not None, "every buffer is held"
        self.count += 1
        self.sequences[buffer] = self.count
        self.bench.shelf.fill(self.rank, buffer, step, self.bench.generation, self.count)
        self.number += 1
        taken = Taken(step, buffer, 1, 0.0, self.keep(buffer, self.count) if due else 0, self.count)
        self.client.taken(self.number, step, taken, due=due, metrics=metrics or {})

    def hear(self):
        """Handle one message of the keeper; False where there is none."""
        if not self.inbox:
            return False
        message = self.inbox.popleft()
        if message["kind"] == "snapshot.released":
            self.release(message["buffer"], message["hold"])
        else:
            self.client.on_message(message)
        return True

    def tell(self):
        """Let one message of ours arrive; False where there is none."""
        if not self.outbox:
            return False
        message = self.outbox.popleft()
        if message["kind"].startswith("disk."):
            self.bench.disk.on_message(self.rank, message, ())
        else:
            self.bench.heard_holds[self.rank, message["buffer"]] = message["hold"]
            self.bench.shelf.offers.add((self.rank, message["buffer"], message["hold"]))
        return True


class Bench(DiskBench):
    shelf_type = Shelf

    def __init__(self, directory, *, skip=False, **rest):
        self._skip, self.heard_holds = skip, {}
        super().__init__(directory, **rest)
        self.ranks = [Rank(self, rank) for rank in range(self.world_size)]
        self.shelf.released = lambda rank, buffer: self.ranks[rank].inbox.append(
            {"kind": "snapshot.released", "buffer": buffer, "hold": self.heard_holds.get((rank, buffer), 0)}
        )
        self.enter()

    def make(self, directory, interval, keep):
        return OnDemand(directory, self.shelf, keep, "disk", skip=self._skip)

    def send(self, rank, message, fds=()):
        self.ranks[rank].inbox.append(message)

    def enter(self, committed=None):
        for rank in getattr(self, "ranks", []):
            rank.client.rewound()
        self.clients = []
        return super().enter(committed)

    def settle(self):
        """Let all messages arrive, none of the writers' work."""
        while any([r.tell() for r in self.ranks] + [r.hear() for r in self.ranks]):
            continue

    def work(self):
        """Let everything come to its end."""
        self.settle()
        while self.write():
            self.settle()

    def save(self, step, **rest):
        for rank in self.ranks:
            rank.save(step, **rest)
        self.settle()

    def drain(self, **rest):
        for _ in range(50):
            if self.disk.drained(True):
                return True
            self.work()
        return False

    def close_all(self):
        for rank in self.ranks:
            self.settle()
            self.disk.away(rank.rank, "has closed")
        assert self.drain()

    @property
    def fates(self):
        first, *others = [{n: what for n, (what, _) in r.fates.items()} for r in self.ranks]
        assert all(other == first for other in others), "the ranks were told different fates"
        return first


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**arguments):
        made.append(Bench(str(tmp_path / "ckpt"), **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def on_disk(tmp_path):
    return sorted((n for n in os.listdir(tmp_path / "ckpt") if not n.startswith(".")), key=lambda n: (len(n), n))


def check(tmp_path, step, world_size=2):
    for rank in range(world_size):
        with open_checkpoint(str(tmp_path / "ckpt" / f"step-{step}"), rank, world_size) as state:
            assert bytes(state.payload()) == rank_state(rank, world_size, step).payload


def test_each_save_is_committed_where_the_disk_is_faster(bench, tmp_path):
    b = bench()
    for step in (7, 8, 20):
        b.save(step)
        b.work()
    assert b.fates == {1: "committed", 2: "committed", 3: "committed"}
    assert on_disk(tmp_path) == ["step-7", "step-8", "step-20"]  # step 7's data wait for readers
    b.close_all()
    assert on_disk(tmp_path) == ["step-8", "step-20"]
    check(tmp_path, 20)
    assert b.shelf.held == set()


def test_what_comes_while_it_is_busy_is_left_out_for_the_newest_and_says_so(bench, tmp_path):
    b = bench()
    for step in (1, 2, 3, 4):
        b.save(step)
    b.work()
    assert b.fates == {1: "committed", 2: "committed by 4", 3: "committed by 4", 4: "committed"}
    assert b.tiers("coalesced") == [2, 3]
    check(tmp_path, 4)


def test_skip_saves_nothing_that_comes_while_it_is_busy(bench):
    b = bench(skip=True)
    for step in (1, 2, 3):
        b.save(step)
    b.work()
    b.save(4)
    b.work()
    assert b.fates == {1: "committed", 2: "skipped", 3: "skipped", 4: "committed"}
    assert b.tiers("committed") == [1, 4]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_that_is_long_in_being_published_is_followed_by_the_newest(bench, tmp_path, world_size):
    """Its buffers are free when its shards are written: one is held meanwhile, and more come than are remembered."""
    b = bench(world_size=world_size)
    b.save(1)
    b.write(world_size)  # of each rank its shard; not the merge
    b.settle()
    for step in range(2, 60):
        b.save(step)
        assert all(len(rank.held) <= 1 for rank in b.ranks)
    b.work()
    assert b.fates[59] == "committed"
    assert all(what in ("committed", "committed by 59") for number, what in b.fates.items() if number > 1)
    check(tmp_path, 59, world_size)
    assert b.shelf.held == set()


def test_what_is_not_due_here_is_only_remembered(bench):
    b = bench()
    for step in range(1, 41):
        b.save(step, due=step % 20 == 0)
        b.work()
    assert b.tiers("committed") == [20, 40]
    b.save(41, due=False)
    b.close_all()
    assert b.tiers("committed") == [20, 40, 41]  # the last snapshot is not lost
    assert b.disk.problems() == ()


def test_a_rank_that_is_far_ahead_waits_for_nobody_and_one_number_is_saved(bench, tmp_path):
    b = bench()
    for step in range(1, 30):
        b.ranks[0].save(step)
        b.settle()
    for step in range(1, 30):
        b.ranks[1].save(step)
        b.settle()
        b.write()
    b.work()
    b.close_all()
    committed = b.tiers("committed")
    assert committed
    assert committed[-1] == 29
    check(tmp_path, 29)


def test_the_same_step_twice_is_the_later_one(bench, tmp_path):
    b = bench()
    b.save(5)
    b.work()
    b.save(5)
    b.work()
    assert b.fates == {1: "committed", 2: "committed"}
    assert on_disk(tmp_path) == ["step-5"]


def test_ranks_that_do_not_name_one_step_are_told_so(bench):
    b = bench()
    b.ranks[0].save(10)
    b.ranks[1].save(11)
    b.work()
    assert b.fates == {1: "failed"}
    assert "rank 1" in b.ranks[0].fates[1][1] or "rank 0" in b.ranks[0].fates[1][1]
    assert "at the same steps" in b.ranks[0].fates[1][1]
    b.save(12)
    b.work()
    assert b.fates[2] == "committed"
    assert b.shelf.held == set()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_is_the_fate_of_all_that_was_left_out_for_it(bench, tmp_path, code):
    hostile = HostileFiles()
    b = bench(files=lambda rank: hostile if rank == 1 else UnsyncedFiles())
    b.save(1)
    b.work()
    b.save(2)
    b.save(3)
    b.save(4)
    b.write()
    hostile.wounds = {("write", hostile.calls["write"] + 1): Wound(code)}
    b.work()
    fates = b.ranks[0].fates
    assert [fates[n][0] for n in (1, 2)] == ["committed", "committed"]
    assert fates[3][0] == "failed by 4"
    assert fates[4][0] == "failed"
    assert os.strerror(code) in fates[4][1]
    b.save(5)
    b.work()
    assert b.fates[5] == "committed"
    check(tmp_path, 5)


@pytest.mark.parametrize("when", range(8))
def test_a_writer_that_dies_fails_its_save_and_the_next_goes_on(bench, tmp_path, when):
    b = bench()
    b.save(1)
    b.work()
    b.save(2)
    b.write(when)
    b.settle()
    b.kill(1)
    b.work()
    assert b.fates[2] in ("failed", "committed")
    b.save(3)
    b.work()
    assert b.fates[3] == "committed"
    check(tmp_path, 3)
    assert b.shelf.held == set()


def test_a_save_that_ends_while_another_end_of_it_is_carried_out_ends_once(bench, tmp_path, monkeypatch):
    """A keeper that stood still: its storage seems stuck, and the line that it would say so on has broken meanwhile."""
    world = bench()
    world.save(1)
    disk, plain = world.disk, world.disk._do
    token = disk._save.token

    def meets(save, command):
        if save.token == token:
            disk._hear(token, commit.Refused(1, "its line broke"))
        plain(save, command)

    monkeypatch.setattr(disk, "_do", meets)
    disk._hear(token, commit.Refused(0, "its storage is stuck"))
    world.settle()
    assert world.fates[1] == "failed"
    world.save(2)
    world.work()
    assert world.fates[2] == "committed"


def test_writers_that_cannot_live_fail_every_save_by_name_and_none_waits(bench):
    b = bench()
    for _ in range(3):
        b.kill(0)
    b.save(1)
    b.save(2)
    b.work()
    assert b.fates == {1: "failed", 2: "failed"}
    assert "times in a row" in b.ranks[0].fates[2][1]
    b.close_all()


def test_a_rank_that_dies_takes_no_begun_write_along_and_what_it_left_is_saved(bench, tmp_path):
    b = bench()
    b.save(1)
    b.save(2)
    b.save(3)
    b.disk.away(1, "has ended")
    b.work()
    assert b.fates == {1: "committed", 2: "committed by 3", 3: "committed"}
    b.ranks[0].save(4)
    b.work()
    assert b.ranks[0].fates[4][0] == "failed"
    assert "rank 1 has ended" in b.ranks[0].fates[4][1]
    b.disk.away(0, "has ended")
    assert b.drain()
    check(tmp_path, 3)


def test_a_rank_that_dies_between_two_saves_of_the_others(bench, tmp_path):
    b = bench()
    b.ranks[0].save(1)
    b.settle()
    b.disk.away(1, "has ended")
    b.work()
    assert b.ranks[0].fates[1][0] == "failed"
    b.disk.away(0, "has ended")
    assert b.drain()
    assert on_disk(tmp_path) == []


def test_what_the_ranks_left_in_memory_is_written_when_all_are_gone(bench, tmp_path):
    b = bench()
    b.save(1)
    b.work()
    for step in (2, 3, 4):
        b.save(step, due=False)
    b.disk.away(0, "has ended")
    b.disk.away(1, "has ended")
    assert b.drain()
    assert on_disk(tmp_path) == ["step-1", "step-4"]
    check(tmp_path, 4)


def test_what_could_not_be_read_is_left_behind_too_when_an_older_one_was_taken_knowingly(bench, tmp_path):
    """It would be taken for newer by whoever comes when it can be read again."""
    b = bench(keep=Keep(5))
    for step in (10, 20):
        b.save(step)
        b.work()
    b.disk.inventory.complete.discard(20)
    b.disk.inventory.unread.add(20)
    b.shelf.buffers.clear()
    b.enter()
    b.disk.went_back(10)
    for step in (11, 12):
        b.save(step)
        b.work()
    b.close_all()
    assert on_disk(tmp_path) == ["step-10", "step-11", "step-12"]
    assert b.tiers("removed") == [20]
    assert b.disk.inventory.unread == set()


def test_steps_go_back_after_a_restore_and_what_was_ahead_is_left_behind(bench, tmp_path):
    b = bench(keep=Keep(5))
    for step in (10, 20, 30):
        b.save(step)
        b.work()
    b.shelf.buffers.clear()
    b.enter()
    b.disk.went_back(10)
    assert on_disk(tmp_path) == ["step-10", "step-20", "step-30"]  # until something newer is durable
    b.save(11)
    b.work()
    b.save(12)
    b.work()
    b.close_all()
    assert on_disk(tmp_path) == ["step-10", "step-11", "step-12"]
    assert b.tiers("removed") == [20, 30]


def test_a_restore_ends_what_was_offered_and_not_begun(bench):
    b = bench()
    b.save(1)
    b.save(2)
    b.save(3)
    b.enter()
    b.work()
    assert b.fates[3] == "skipped"
    assert b.fates[2] in ("skipped", "committed")
    assert b.fates[1] == "committed"


def test_what_was_measured_decides_what_stays(bench, tmp_path):
    b = bench(keep=Keep(1, best=1, metric="loss"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0)):
        b.ranks[0].save(step, metrics={"loss": loss})
        b.ranks[1].save(step)
        b.work()
    b.close_all()
    assert on_disk(tmp_path) == ["step-2", "step-4"]


class Jumping(SystemClock):
    """Time passes when a test says so; the time of day is another thing."""

    passed, day = 100.0, 1_700_000_000.0

    def now(self):
        return self.passed

    def wall(self):
        return self.day


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_time_of_day_that_jumps_makes_no_state_older_or_younger(bench, tmp_path, jump):
    clock = Jumping()
    b = bench(clock=clock)
    b.save(1)
    b.work()
    age = Restoring(SimpleNamespace(clock=clock, tiers=[b.disk], taken_s={(0, 1): 101.0, (1, 2): 100.5}))._age
    clock.passed, clock.day = clock.passed + 7, clock.day + jump
    (committed,) = b.disk.committed()
    assert age(Plan(1, "disk", "", committed=committed)) == 7.0
    assert age(Plan(1, MEMORY, "", {0: 1, 1: 2})) == 6.5
    assert age(Plan(1, MEMORY, "", {0: 0})) == 0.0, "it cannot be told"
    b.disk.close()
    os.utime(tmp_path / "ckpt" / "step-1", (clock.day - 20, clock.day - 20))
    again = bench(clock=clock)
    (committed,) = again.disk.committed()
    age = Restoring(SimpleNamespace(clock=clock, tiers=[again.disk], taken_s={}))._age
    clock.passed, clock.day = clock.passed + 2, clock.day - jump
    assert age(Plan(1, "disk", "", committed=committed)) == 22.0, (
        "as old as it was when the directory was taken, and 2 s"
    )


def test_a_directory_out_of_the_future_is_new_and_not_younger_than_that(bench, tmp_path):
    b = bench(clock=Jumping())
    b.save(1)
    b.work()
    b.disk.close()
    os.utime(tmp_path / "ckpt" / "step-1", (Jumping.day + 3600, Jumping.day + 3600))
    again = bench(clock=Jumping())
    (committed,) = again.disk.committed()
    age = Restoring(SimpleNamespace(clock=again.clock, tiers=[again.disk], taken_s={}))._age
    assert age(Plan(1, "disk", "", committed=committed)) == 0.0


class Seeded:
    """One seeded world: ranks apart, messages late, writers and ranks killed."""

    def __init__(self, directory, seed):
        self.rng = rng = random.Random(seed)
        self.every, self.apart = 1 + seed % 3, 10 if seed % 5 == 0 else 1
        self.bench = Bench(directory, world_size=rng.choice([1, 2, 3]), skip=rng.random() < 0.3, keep=None)
        self.steps = rng.randint(1, 25)
        self.victim = rng.choice([None, None, rng.randrange(self.bench.world_size)])
        self.gone = set()

    def run(self):
        while self.able() or self.rng.random() < 0.9:
            if self.victim is not None and self.victim not in self.gone and self.rng.random() < 0.02:
                self.kill(self.victim)
            self.rng.choice(self.moves())()
        for rank in self.bench.ranks:
            while rank.rank not in self.gone and (rank.tell() or rank.hear()):
                continue
            self.bench.disk.away(rank.rank, "has closed")
        assert self.bench.drain()
        self.bench.settle()

    def living(self):
        return [rank for rank in self.bench.ranks if rank.rank not in self.gone]

    def able(self):
        slowest = min(rank.number for rank in self.bench.ranks)
        return [rank for rank in self.living() if rank.number < min(self.steps, slowest + self.apart)]

    def moves(self):
        moves = [move for rank in self.living() for move in (rank.tell, rank.hear)] + [lambda: self.bench.write(1)] * 2
        moves += [lambda rank=rank: rank.save(rank.number + 1, due=self.due(rank.number + 1)) for rank in self.able()]
        if self.rng.random() < 0.01:
            moves.append(lambda: self.bench.kill(self.rng.randrange(self.bench.world_size)))
        return moves

    def kill(self, rank):
        self.gone.add(rank)
        self.bench.ranks[rank].outbox.clear()
        self.bench.disk.away(rank, "was killed")

    def due(self, number):
        return number % self.every == 0


def run_seeds(tmp_path, seeds):
    for seed in seeds:
        world = Seeded(str(tmp_path / str(seed) / "ckpt"), seed)
        try:
            world.run()
            for rank in world.living():
                due = {number for number in range(1, rank.number + 1) if world.due(number)}
                assert due <= rank.fates.keys(), f"seed {seed}, rank {rank.rank}: some have no fate"
            for step in world.bench.tiers("committed"):
                check(tmp_path / str(seed), step, world.bench.world_size)
            assert world.bench.shelf.held == set(), f"seed {seed}"
            for rank in world.living():
                assert len(rank.held) <= 1, f"seed {seed}, rank {rank.rank}: buffers are held for nobody"
        finally:
            world.bench.close()


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_any_order_of_messages_deaths_and_writes_ends_with_a_fate_for_each(tmp_path, first):
    """Seeded worlds: one number for all ranks, nothing torn, nothing held, no save without a fate."""
    run_seeds(tmp_path, range(first, first + 10))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_three_thousand_seeded_worlds(tmp_path, first):
    run_seeds(tmp_path, range(first, first + 100))
