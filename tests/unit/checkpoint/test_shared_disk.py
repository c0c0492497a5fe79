"""The disk tier on several nodes: a simulated world in which the coordinator dies at every word of a save."""

import os
import random

import pytest

from everstep.checkpoint import catalog
from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact, Fragment
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.holder import OwnHold
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.scribe import Scribe
from everstep.checkpoint.storage.object_claim import LEASE_S, RENEW_S, ObjectClaim
from everstep.checkpoint.storage.owner import OWNER, read_owner
from everstep.clock import SystemClock
from everstep.errors import CheckpointError, ConfigurationError
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.recovery.link import Link
from everstep.testing.disk_bench import no_metadata
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.memory_bucket import MemoryBucket
from everstep.testing.shared_disk_bench import Hub
from everstep.testing.states import rank_state


class World:
    """A job on the bench, until its end. The law stands in `check`."""

    def __init__(self, tmp_path, seed, nodes, **more):
        self.path = tmp_path / "ckpt"
        self.rng = random.Random(seed)
        self.hub = Hub(str(self.path), nodes, self.rng, **more)
        self.step, self.generation = 0, 0
        self.newest = 0  # that was ever told to be durable

    def entered(self):
        return all(node.generation == self.hub.generation for node in self.hub.nodes.values())

    def turn(self, words=8):
        """A step where all can do one, and some words."""
        if self.entered():
            if self.generation != self.hub.generation:
                self.generation, self.step = self.hub.generation, self.hub.began
            self.step += 1
            self.hub.step(self.step)
        for _ in range(self.rng.randint(0, words)):
            self.hub.deliver()
        self.newest = max([self.newest, *self.hub.tiers("committed")])

    def until_commits(self, count, turns=400):
        """Go on until so many saves were committed."""
        while len(self.hub.tiers("committed")) < count:
            turns -= 1
            assert turns, "no save comes to its end any more"
            self.turn()

    def drain(self):
        """The end is asked for again and again, between any two words."""
        for _ in range(3000):
            done = [node.disk.drained(True) for node in self.hub.nodes.values()]
            if all(done):
                last = self.step if self.generation == self.hub.generation else self.hub.began  # it has gone back since
                assert max([0, *self.hub.tiers("committed")]) >= last, "a node was done before the last step was"
                self.hub.settle()
                return
            for _ in range(self.rng.randint(0, 5)):
                self.hub.deliver()
        raise AssertionError("the end is never reached")

    def check(self):
        """Whatever lies there under a checkpoint's name is whole, is one of the states ever saved, and is none older
        than what was told to be durable; nothing is held any more."""
        found = catalog.scan(str(self.path))
        for one in found:
            assert not catalog.verify(one), one
            for rank in range(self.hub.world_size):
                with open_checkpoint(one.path, rank, self.hub.world_size) as state:
                    assert bytes(state.payload()) == rank_state(rank, self.hub.world_size, one.step).payload
        coordinator = next(iter(self.hub.nodes.values())).disk
        assert {one.step for one in found} == coordinator.inventory.complete, "what lies there is known"
        if self.newest:
            assert max(one.step for one in found) >= self.newest
        assert max([0, *self.hub.tiers("committed")]) >= self.step, "the last step is not durable"
        assert [node.shelf.held for node in self.hub.nodes.values()] == [set() for _ in self.hub.nodes]


@pytest.fixture
def world(tmp_path):
    made = []

    def make(seed, nodes=2, **more):
        made.append(World(tmp_path / str(len(made)), seed, nodes, **more))
        return made[-1]

    (tmp_path / "0").mkdir()
    yield make
    for one in made:
        one.hub.close()


@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_save_together_and_the_last_step_too(world, nodes):
    w = world(1, nodes, ranks_each=2)
    w.until_commits(3)
    w.drain()
    w.check()
    last = max(w.hub.tiers("committed"))
    assert last == w.step
    assert len([n for n in os.listdir(w.path) if n.startswith("step-")]) == 2
    assert w.hub.tiers("failed") == []
    assert all(not node.disk.problems() for node in w.hub.nodes.values())


def _killed(tmp_path, seed, at, nodes, victim, in_flight):
    """Begin, kill a node after so many words, go on to two more saves and the end. Return how many words there were."""
    w = World(tmp_path, seed, nodes)
    try:
        w.until_commits(1)
        begun = w.hub.delivered
        while w.hub.delivered - begun < at:
            w.turn(words=2)
        w.hub.kill(f"node-{victim}", in_flight=in_flight)
        w.until_commits(len(w.hub.tiers("committed")) + 2)
        w.drain()
        w.check()
    finally:
        w.hub.close()


@pytest.mark.sample(20)
@pytest.mark.parametrize("at", range(0, 60, 3))
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_coordinator_that_dies_at_any_word_of_a_save_leaves_one_of_the_states_saved(tmp_path, at, nodes):
    _killed(tmp_path / "ckpt", 7 * at + nodes, at, nodes, 0, in_flight=bool(at % 2))


def test_words_that_were_overtaken_make_no_node_forget_a_checkpoint(world):
    """Node 0 tells what is whole, commits one more and says so; node 1 hears of the commit before the roster."""
    w = world(2)
    w.until_commits(1)
    w.hub.settle()
    first, second = (node.disk for node in w.hub.nodes.values())
    whole = [one.step for one in second.committed()]
    told = first.telling()
    w.until_commits(2)
    w.hub.settle()
    newer = [one.step for one in second.committed()]
    assert max(newer) > max(whole)
    second.told("node-0", told)
    members = tuple(Member(r, Incarnation("b", 9, 1), home, r, False, "kept") for r, home in w.hub.homes.items())
    second.on_roster(Roster(0, 1, members))
    assert [one.step for one in second.committed()] == newer


def loss(step):
    return abs(step - 6.5)


class Measured(World):
    """Rank 0 says from where it goes on, and what it has measured when it has ended a step."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self._ended, self.hub.step, self._said = self.hub.step, self.ended, -1

    def ended(self, step):
        client = self.hub.nodes[self.hub.homes[0]].clients[0]
        if self._said < self.generation and self.hub.plans[self.generation][1]:
            client.restored(self.hub.began, 1000)
        self._said = self.generation
        self._ended(step)
        client.measured(step, {"loss": loss(step)})


@pytest.mark.parametrize("home", ["node-0", "node-1"])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_by_a_metric_stays_wherever_rank_0_stands_and_whoever_coordinates(tmp_path, home, seed):
    keep = Keep(1, best=1, metric="loss")
    kept = []
    for run in range(2):
        w = Measured(tmp_path, 10 * seed + run, 2, keep=keep, interval=2)
        w.hub.homes = {0: home, 1: "node-0" if home == "node-1" else "node-1"}
        try:
            w.until_commits(3)
            w.hub.kill("node-0", in_flight=bool(seed % 2))
            w.until_commits(6)
            w.drain()
            w.check()
            saved = [*kept, *w.hub.tiers("committed")]
        finally:
            w.hub.close()
        found = {one.step: one.manifest.metrics for one in catalog.scan(str(tmp_path / "ckpt"))}
        best = min(saved, key=loss)
        assert {best, max(saved)} <= set(found) <= {best, max(saved), saved[-1]}, "the last save never goes with itself"
        assert found[best] == {"loss": loss(best)}
        kept = list(found)


def _life(tmp_path, seed):
    """Nodes die one after the other, at any word, until one is left."""
    rng = random.Random(seed)
    nodes = rng.choice([2, 3, 4])
    w = World(tmp_path, seed, nodes, interval=rng.choice([1, 3, 5]), ranks_each=rng.choice([1, 2]))
    try:
        for _ in range(nodes - 1):
            begun, upto = w.hub.delivered, rng.randint(0, 80)
            while len(w.hub.nodes) > 1 and w.hub.delivered - begun < upto:
                w.turn(words=rng.choice([1, 2, 8]))
            for _ in range(rng.choice([1, 1, 2])):
                if len(w.hub.nodes) > 1:
                    victim = rng.choice([0, 0, *range(len(w.hub.nodes))])
                    w.hub.kill(list(w.hub.nodes)[victim], in_flight=rng.random() < 0.5)
        w.until_commits(len(w.hub.tiers("committed")) + 2)
        w.drain()
        w.check()
    finally:
        w.hub.close()


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_die_one_after_the_other_lose_nothing_that_was_durable(tmp_path, seed):
    _life(tmp_path / "ckpt", seed)


@pytest.mark.long
def test_two_thousand_worlds_lose_nothing_that_was_durable(tmp_path):
    for seed in range(100, 2100):
        _life(tmp_path / str(seed) / "ckpt", seed)


class Sleeping(SystemClock):
    """Time passes where somebody sleeps."""

    def __init__(self):
        self.passed = 0.0
        self.then = lambda: None

    def now(self):
        return self.passed

    def sleep(self, seconds):
        self.passed += seconds
        self.then()


@pytest.mark.parametrize("comes", [True, False])
def test_what_is_seen_late_is_waited_for_and_what_never_comes_fails_the_save_by_name(tmp_path, comes):
    """CL-05: a shard of another node is there, and this one does not see it yet; or that node wrote elsewhere."""
    clock, folder = Sleeping(), tmp_path / names.committed(1)
    folder.mkdir()
    body = {"save": "s", "step": 1, "epoch": 0, "generation": 0, "world_size": 1, "rank": 0, "entries": ()}
    fragment = Fragment(**body, files={"__0_0.distcp": FileFact(3, "x")})

    def then():
        if comes and clock.passed > 40:
            (folder / "__0_0.distcp").write_bytes(b"abc")

    clock.then = then
    ours, theirs = Link.pair()
    scribe = Scribe(theirs, str(tmp_path), 0, UnsyncedFiles(), no_metadata, {}, clock)
    try:
        if comes:
            scribe._see(names.committed(1), {0: fragment}, 90.0)
            assert 40 < clock.passed < 90
        else:
            with pytest.raises(CheckpointError, match=r"the writer of rank 0 .*is not seen here after 90 s"):
                scribe._see(names.committed(1), {0: fragment}, 90.0)
    finally:
        ours.close()
        theirs.close()


# The claim of an object store.


class Store(SystemClock):
    """A bucket, and time that passes when somebody waits for it: who lives renews, and what is due happens."""

    def __init__(self):
        self.bucket, self.passed = MemoryBucket(), 0.0
        self.living, self.renewed, self.due = [], {}, []

    def now(self):
        return self.passed

    def sleep(self, seconds):
        self.passed += seconds
        for at, act in [one for one in self.due if one[0] <= self.passed]:
            self.due.remove((at, act))
            act()
        for claim in self.living:
            if self.passed - self.renewed.get(claim, 0.0) >= RENEW_S:
                self.renewed[claim] = self.passed
                claim.renew()

    def wait(self, event, timeout_s):
        return event.wait()  # who renews is moved by `sleep`

    def rival(self):
        """Another job comes: return its claim, or None where it is refused."""
        claim = ObjectClaim(self.bucket, "bbbbbbbb", clock=self)
        try:
            claim.take("another job")
        except ConfigurationError:
            return None
        return claim


class StoreHold(OwnHold):
    """Holds an object store beside the directory in which the bench's writers write."""

    def __init__(self, directory, store):
        super().__init__(directory, several=True)
        self.store, self.claim = store, ObjectClaim(store.bucket, self.job, clock=store, several=True)

    def open(self, run, series=None):
        found = super().open(run, series)
        self.claim.take(run)
        self.store.living.append(self.claim)
        return found

    def go_on(self, job, run):
        super().go_on(job, run)
        self.claim.go_on(job, run)
        self.store.living.append(self.claim)

    def close(self):
        super().close()
        self.claim.over = self.over
        if self.claim in self.store.living:
            self.store.living.remove(self.claim)
        self.claim.close()


NOTICED_S = 10.0
"""So long a node may be silent before it is given up (docs/launcher.md)."""


def _claimed(path, seed):
    """Nodes go one after the other, each noticed late; another job comes, and is refused till the end."""
    rng, store = random.Random(seed), Store()
    path.mkdir()
    hub = Hub(str(path / "ckpt"), 4, rng, hold=lambda directory: StoreHold(directory, store), clock=store)
    w = World.__new__(World)
    w.path, w.rng, w.hub, w.step, w.generation, w.newest = path / "ckpt", rng, hub, 0, 0, 0
    try:
        while len(hub.nodes) > 1:
            w.until_commits(len(hub.tiers("committed")) + 1)
            victim = rng.choice([next(iter(hub.nodes)), rng.choice(list(hub.nodes))])
            owner = read_owner(store.bucket)["job"]
            gone = hub.nodes[victim].disk._hold
            if gone.claim in store.living:
                store.living.remove(gone.claim)  # it renews no more, and nobody knows
            store.due.append((store.passed + NOTICED_S, lambda v=victim: (hub.kill(v, in_flight=True), hub.settle())))
            store.sleep(rng.random() * NOTICED_S)
            assert store.rival() is None, f"seed {seed}: two jobs in one store, after {victim} had gone"
            while store.due:
                store.sleep(1.0)
            assert read_owner(store.bucket)["job"] == owner, "it is the same job's"
            assert len(store.living) == 1, "and one node renews it"
        w.drain()
        assert store.rival() is None
    finally:
        hub.close()
    assert OWNER not in store.bucket.objects, "the job has ended, and gives it up"
    after = store.rival()
    assert after is not None
    after.close()


@pytest.mark.parametrize("seed", [0, 1, 2, 192])
def test_an_object_store_stays_its_job_s_whatever_nodes_go(tmp_path, seed):
    """The node that renews the claim goes, and is missed ten seconds later: its successor goes on with it.

    Seed 192: a node had not heard of the end of a save, and of the next one's beginning before it: no save after that.
    """
    _claimed(tmp_path / "job", seed)


@pytest.mark.long
def test_a_hundred_jobs_keep_their_store(tmp_path):
    for seed in range(100, 200):
        _claimed(tmp_path / str(seed), seed)


def test_a_lease_outlasts_what_it_takes_to_notice_a_loss():
    assert LEASE_S > RENEW_S + NOTICED_S + RENEW_S, "a successor renews at once, on a node that may be busy"
