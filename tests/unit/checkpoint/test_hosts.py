"""Ranks of a plain loop on several hosts, simulated: whatever is late and whoever dies, one step for all."""

import importlib.util
import os
import random
import shutil
from pathlib import Path

import pytest

from everstep.checkpoint import catalog

_spec = importlib.util.spec_from_file_location("hosts_world", Path(__file__).with_name("hosts_world.py"))
hosts_world = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hosts_world)
World, read, truth = hosts_world.World, hosts_world.read, hosts_world.truth


@pytest.fixture
def world(tmp_path):
    made = []

    def make(homes=(0, 0, 1, 1), seed=0, attempt=1, **rest):
        made.append(World(str(tmp_path / "ckpt"), homes, seed, attempt, **rest))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def tell():
    """Tell a story of three attempts for each seed."""

    def tell(directory, seeds):
        for seed in seeds:
            worlds = []

            def make(*arguments, worlds=worlds, where=str(directory / str(seed)), **rest):
                worlds.append(World(where, *arguments, **rest))
                return worlds[-1]

            story = Story(make, str(directory / str(seed)), seed)
            try:
                for _ in range(3):
                    story.attempt()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            finally:
                for one in worlds:
                    one.close()
            shutil.rmtree(directory / str(seed), ignore_errors=True)

    return tell


def whole(directory, world_size):
    """All that is complete is of one attempt and one step, on all ranks; return it, newest first: step, attempt."""
    found = []
    for one in catalog.scan(str(directory)):
        if not one.complete:
            continue
        path = os.path.join(str(directory), f"step-{one.step}")
        values = [read(path, rank, world_size) for rank in range(world_size)]
        attempt = values[0][0]
        assert values == [truth(attempt, rank, one.step).tolist() for rank in range(world_size)], "a mixture"
        found.append((one.step, int(attempt)))
    return sorted(found, reverse=True)


def test_ranks_of_two_hosts_save_and_restore_from_memory_and_from_disk(world, tmp_path):
    w = world()
    assert w.start() == [None] * 4
    for step in (1, 2, 3):
        for rank in w.ranks:
            rank.save(step)
        w.run()
    assert [rank.fates for rank in w.ranks] == [dict.fromkeys((1, 2, 3), "committed")] * 4
    for rank in w.ranks:
        rank.save(4, due=False)
    w.run()
    w.restore()
    assert [rank.restored for rank in w.ranks] == [(4, truth(1, r, 4).tolist()) for r in range(4)]
    for rank in w.ranks:
        rank.close()
    w.rest(lambda: all(rank.phase == "closed" for rank in w.ranks))
    assert [rank.problems for rank in w.ranks] == [[]] * 4
    assert not any(host.loop.running for host in w.hosts)
    assert whole(tmp_path / "ckpt", 4)[0] == (4, 1)  # what was in memory alone is written at the end
    again = world((0, 1, 2, 0), attempt=2)
    assert again.start() == [(4, truth(1, r, 4).tolist()) for r in range(4)]


def test_what_a_lost_host_had_in_memory_is_not_counted_on(world, tmp_path):
    """Its ranks had ended, and their snapshots were known; then it was lost itself, and the others end."""
    w = world()
    w.start()
    for rank in w.ranks:
        rank.save(1, due=False)
    for rank in (2, 3):
        w.ranks[rank].die()
    w.run()
    w.lose(1)
    for rank in (0, 1):
        w.ranks[rank].die()
    w.rest(lambda: not w.hosts[0].loop.running)
    assert whole(tmp_path / "ckpt", 4) == []


def test_what_all_ranks_left_in_memory_is_written_when_all_are_killed_on_both_hosts(world, tmp_path):
    w = world()
    w.start()
    for step in (1, 2):
        for rank in w.ranks:
            rank.save(step, due=False)
    for rank in (3, 0, 2, 1):
        w.ranks[rank].die()
    w.rest(lambda: not any(host.loop.running for host in w.hosts))
    assert whole(tmp_path / "ckpt", 4) == [(2, 1)]


def test_what_is_kept_for_a_save_that_a_restore_left_out_is_free_again_on_every_host(world):
    """Else the buffers of a rank would run out, a restore each, and no save could be made any more."""
    w = world(on_busy="coalesce")
    w.start()
    step = 0
    for _ in range(6):
        for each in (1, 2, 3):
            for rank in w.ranks:
                rank.save(step + each)
                while rank.up:  # what is being written stays so; what is kept for later is told
                    rank.tell()
        w.restore()
        step = w.ranks[0].step
    for rank in w.ranks:
        rank.save(step + 1)
    w.rest(lambda: all(rank.fates[rank.number] for rank in w.ranks))
    assert [rank.fates[rank.number] for rank in w.ranks] == ["committed"] * 4
    w.run()
    assert [rank.host.shelf.held(rank.rank) for rank in w.ranks] == [frozenset()] * 4
    assert [rank.snapshotter._open for rank in w.ranks] == [{}] * 4


def test_left_behind_memory_is_void_on_every_host(world):
    """After a restore of an older step nothing newer is ever taken again, wherever it lies."""
    w = world()
    w.start()
    for step in (1, 2):
        for rank in w.ranks:
            rank.save(step)
        w.run()
    for rank in w.ranks:
        rank.save(3, due=False)
    w.restore(2)
    assert [rank.restored[0] for rank in w.ranks] == [2] * 4
    assert {row[2] for rank in (2, 3) for row in w.hosts[1].shelf.rows(rank)} <= {1, 2}


HOMES = [(0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 2), (0, 0, 0, 0)]
ENDS = [
    "close", "kill all", "lose a host", "lose the leading host", "lose a keeper", "lose the leading keeper",
    "kill a rank", "kill a writer", "close one", "restore",
]  # fmt: skip


class Story:
    """Attempts of one script, one after another, on one directory: what must hold whatever is drawn."""

    def __init__(self, make, directory, seed):
        self.make, self.directory, self.random = make, directory, random.Random(seed)
        self.durable = 0  # the newest step that a rank was told is durable
        self.lineage = 0

    def attempt(self):
        self.lineage += 1
        self.whole = True  # nobody was lost or killed
        self.interval = self.random.choice([1, 1, 2, 3])
        homes = self.random.choice(HOMES)
        w = self.w = self.make(
            homes, self.random.random(), self.lineage, on_busy=self.random.choice(["coalesce", "skip"])
        )
        self.check_begun(w.start())
        self.train(self.random.randint(0, 6))
        for what in self.random.sample(ENDS, self.random.randint(0, 2)):
            self.whole &= what in ("close", "restore")
            self.happen(what)
            self.train(self.random.randint(0, 4))
        self.finish()

    def check_begun(self, begun):
        """All from one step of one lineage, and none older than what was told to be durable."""
        steps = {None if one is None else (one[0], one[1][0]) for one in begun}
        assert len(steps) == 1, f"one world, several steps: {begun}"
        step, lineage = next(iter(steps)) or (0, 0)
        assert step >= self.durable, f"begun from {step}, and {self.durable} was durable"
        if step:
            assert [one[1] for one in begun] == [truth(lineage, rank, step).tolist() for rank in range(len(begun))]

    def hear(self):
        """What ranks have been told."""
        self.durable = max(self.durable, self.w.reported)

    def train(self, steps):
        """Ranks that live step on, one behind another or together; those who have lost a peer may be ahead of it."""
        ranks = self.w.living("runs")
        goal = max((rank.step for rank in ranks), default=0) + steps
        while behind := [rank for rank in ranks if rank.step < goal]:
            least = min(rank.step for rank in behind)
            rank = self.random.choice([one for one in behind if one.step <= least + self.random.choice([0, 0, 1, 3])])
            rank.save(rank.step + 1, due=(rank.step + 1) % self.interval == 0)
            for _ in range(self.random.choice([0, 1, 3, 12])):
                self.w.turn()
            self.hear()

    def happen(self, what):
        w, ranks = self.w, self.w.living("runs")
        others = [host.number for host in w.hosts[1:] if host.alive]
        if what.startswith("lose"):
            found = others if what in ("lose a host", "lose a keeper") else [0] * w.hosts[0].alive
            if found:
                (w.lose_keeper if "keeper" in what else w.lose)(self.random.choice(found))
        elif what == "kill a writer":
            found = [one for host in w.hosts if host.alive for one in host.hands.helpers if one.scribe is not None]
            if found:
                self.random.choice(found).kill()
        elif what == "restore":
            if len(ranks) == w.size and all(host.alive for host in w.hosts):
                self.restore()
        elif ranks:
            self.end(what, ranks)

    def end(self, what, ranks):
        one = [self.random.choice(ranks)]
        for rank in ranks if what in ("close", "kill all") else one:
            rank.die() if what.startswith("kill") else rank.close()

    def restore(self):
        self.w.restore()
        self.hear()
        self.check_begun([rank.restored for rank in self.w.ranks])
        self.lineage += 1
        self.w.attempt = self.lineage  # what follows is other than what was left behind

    def finish(self):
        """Whoever lives closes, or is killed; nothing is left, and nothing that was told was wrong."""
        w, last = self.w, {rank.step for rank in self.w.ranks}
        kill = self.random.random() < 0.5
        for rank in w.living():
            served = rank.host.alive and rank.host.loop.running
            if kill or not served or rank.phase not in ("runs", "closing"):
                rank.die()
            elif rank.phase == "runs":
                rank.close()
        w.rest(lambda: not any(host.alive and host.loop.running for host in w.hosts))
        w.run()
        self.hear()
        for rank in w.living("closed"):
            assert None not in rank.fates.values(), f"rank {rank.rank} waits for what became of {rank.fates}"
        for number in {number for rank in w.ranks for number in rank.fates}:
            told = {rank.fates.get(number) for rank in w.ranks} - {None}
            assert len(told) <= 1, f"number {number} is {told}"
        found = whole(self.directory, w.size)
        assert (found[0][0] if found else 0) >= self.durable
        if self.whole and not kill:
            assert {found[0][0] if found else 0} == last, "the last step is not durable, and nothing had happened"
        assert not [name for name in os.listdir(self.directory) if name.endswith(".tmp")] or not all(
            host.alive for host in w.hosts
        )


def test_whatever_dies_whenever_all_begin_from_one_step_and_nothing_durable_is_lost(tell, tmp_path):
    tell(tmp_path, range(12))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_whatever_dies_at_length(tell, tmp_path, part):
    tell(tmp_path, range(1000 + 200 * part, 1200 + 200 * part))
