"""Copies on other nodes: a simulated job of several nodes, real shelves and peer tiers, in which anything may die."""

import functools
import gc
import os
import random

import pytest

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.peer_save import Phase
from everstep.checkpoint.peer_leader import Leader
from everstep.launcher.agent import ledger
from everstep.testing.nodes import Net, SimNode, StillClock, roster
from everstep.testing.peer_parts import Broken, payload
from everstep.testing.peer_world import Job


def memfds():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "everstep-snapshot" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


@pytest.fixture
def job():
    jobs = []
    gc.collect()
    before = memfds()

    def make(*arguments, **settings):
        jobs.append(Job(*arguments, **settings))
        return jobs[-1]

    yield make
    for one in jobs:
        one.close()
    gc.collect()
    assert memfds() == before, "memory is left behind"


def plan(job):
    return next(node.companions["snapshot"].plan for node in job.alive if node.companions["snapshot"].plan)


def until_counted(job, step, turns=3000):
    for _ in range(turns):
        if job.counted() >= step:
            return
        job.turn()
    raise AssertionError(f"step {step} does not come to count: {job.counted()}")


def test_a_lost_node_costs_the_interval_that_was_achieved_and_the_line_says_whose_copy_it_is(job):
    j = job(1, nodes=3)
    j.begin()
    until_counted(j, 5)
    counted = j.counted()
    j.kill_node("n1")
    j.begin()
    assert j.begun[-1] == (counted, 0)
    assert plan(j).tier == "memory"
    assert f"step {counted} from memory: the newest that all 6 ranks hold" in plan(j).reason
    assert "rank 2" in plan(j).reason
    assert " s old" in plan(j).reason
    until_counted(j, counted + 5)  # and copies are made anew


@pytest.mark.parametrize("all_hear", [True, False])
def test_what_the_world_begins_from_is_the_furthest_tier_of_any_rank_and_each_rank_s_its_own(job, all_hear):
    j = job(17, nodes=3, per_node=1, all_hear=all_hear)
    j.begin()
    until_counted(j, 4)
    j.kill_worker(0)
    j.begin()
    assert {name: told[0]["world"]["tier"] for name, told in entered(j).items()} == dict.fromkeys(j.nodes, "memory")
    j.kill_node("n1")
    j.begin()
    step = j.begun[-1][0]
    for told in entered(j).values():
        assert {words["world"]["tier"] for words in told.values()} == {"peer"}
        begun = ledger.generation(roster(2, j.homes), {rank: {"snapshot": words} for rank, words in told.items()})
        assert (begun.restore_step, begun.restored_from) == (step, "peer")
    own = [w.told["restore"].get("from", "memory") for _, w in sorted(j.workers.items())]
    assert own == ["memory", "peer", "memory"]


def entered(job):
    """What each node's memory tier says of all ranks, were it asked again with the plan that it has."""
    shelves = {node.name: node.companions["snapshot"] for node in job.alive}
    return {name: {rank: {"world": shelf._of_the_world()} for rank in job.homes} for name, shelf in shelves.items()}


def test_the_node_of_rank_0_may_go_like_any_other(job):
    j = job(2, nodes=3)
    j.begin()
    until_counted(j, 4)
    counted = j.counted()
    j.kill_node("n0")
    j.begin()
    assert j.begun[-1] == (counted, 0)
    until_counted(j, counted + 3)
    again = j.counted()
    j.kill_node("n1")
    j.begin()
    assert j.begun[-1][0] == again


def test_two_copies_outlive_two_nodes_at_once(job):
    j = job(3, nodes=4, per_node=1, copies=2)
    j.begin()
    until_counted(j, 4)
    counted = j.counted()
    j.kill_node("n1")
    j.kill_node("n3")
    j.begin()
    assert j.begun[-1] == (counted, 0)


def test_a_rack_may_go_where_the_other_rack_keeps_its_copies(job):
    j = job(4, nodes=4, per_node=1, domains={"n0": "r1", "n1": "r1", "n2": "r2", "n3": "r2"})
    j.begin()
    until_counted(j, 4)
    counted = j.counted()
    j.kill_node("n2")
    j.kill_node("n3")
    j.begin()
    assert j.begun[-1] == (counted, 0)


def test_a_process_that_dies_costs_no_step_more_than_before(job):
    j = job(5)
    j.begin()
    until_counted(j, 3)
    newest = min(worker.step for worker in j.workers.values())
    j.kill_worker(1)
    j.begin()
    assert j.begun[-1][0] >= newest


def test_cl_17_a_flipped_byte_in_a_replica_is_found_named_and_the_next_best_taken(job):
    j = job(6, nodes=2, per_node=1)
    j.begin()
    until_counted(j, 6)
    assert j.flip("n0", counted=True)
    step = j.nodes["n0"].companions["peer"].counted[0]
    j.kill_node("n1")
    j.begin()
    (damaged,) = [e for e in j.nodes["n0"].events if getattr(e, "what", "") == "damaged"]
    assert damaged.step == step
    assert "rank 1" in damaged.text
    assert "damaged: its payload has checksum" in damaged.text
    assert j.begun[-1][0] < step
    assert len({worker.began for worker in j.workers.values()}) == 1


def test_a_flipped_byte_is_found_as_well_where_the_copy_is_fetched_and_another_copy_is_taken(job):
    j = job(15, nodes=4, per_node=1, copies=2)
    j.begin()
    until_counted(j, 4)
    keepers = [n.name for n in j.alive if any(c.snapshot.rank == 1 for c in n.companions["peer"].kept.copies(0.0))]
    for copy in j.nodes[keepers[0]].companions["peer"].kept.copies(0.0):
        if copy.snapshot.rank == 1:
            found = j.nodes[keepers[0]].companions["peer"].kept.find(copy.place)
            (byte,) = os.pread(found.fd, 1, 4200)
            os.pwrite(found.fd, bytes([byte ^ 1]), 4200)
    counted = j.counted()
    j.kill_node("n1")
    j.homes[1] = next(n.name for n in j.alive if n.name not in keepers)
    j.begin()
    assert j.begun[-1] == (counted, 0)


def test_a_copy_that_was_sent_is_hashed_on_both_sides(job):
    j = job(7, nodes=2, per_node=1)
    j.begin()
    until_counted(j, 3)
    for node in j.alive:
        shelf, peer = node.companions["snapshot"], node.companions["peer"]
        for copy in peer.kept.copies(0.0):
            found = peer.kept.find(copy.place)
            held = os.pread(found.fd, found.size, 0)
            assert segment.checksum_of(held, segment.parse(held)) is not None
            home = j.nodes[j.homes[copy.snapshot.rank]].companions["snapshot"]
            for own in [
                s for s in home.sealed() if s.step == copy.snapshot.step
            ]:  # that of what counts is pinned there
                mine = os.pread(home.fd(own.rank, own.buffer), found.size, 0)
                assert segment.checksum_of(mine, segment.parse(mine)) == segment.checksum_of(held, segment.parse(held))
        assert shelf.bytes > 0


def test_nobody_keeps_copies_on_one_node_and_nothing_is_begun_for_it(job):
    j = job(8, nodes=1)
    j.begin()
    j.run(200)
    assert j.porters == []
    assert j.counted() == -1
    j.kill_worker(0)
    newest = min(worker.step for worker in j.workers.values())
    j.begin()
    assert j.begun[-1][0] >= newest


def test_an_interval_of_0_keeps_no_copies_and_still_fetches_what_was_left_on_another_node(job):
    j = job(9, nodes=2, interval=0)
    j.begin()
    j.run(300)
    assert j.counted() == -1
    newest = min(worker.step for worker in j.workers.values())
    j.kill_worker(3)
    j.homes[3] = "n0"  # a spare of the other node takes its place
    j.begin()
    assert j.begun[-1][0] >= newest
    assert "rank 3 from its own memory, left on node n1" in plan(j).reason


@pytest.mark.parametrize("side", ["n0", "n1"])
@pytest.mark.parametrize("seed", range(5))
def test_a_porter_that_dies_over_a_fetch_says_nothing_against_the_copy(job, side, seed):
    """An error is not damage: whoever strikes a copy out for it goes further back."""
    j = job(seed, nodes=2, interval=0)
    j.begin()
    j.run(300)
    newest = min(worker.step for worker in j.workers.values())
    j.kill_worker(3)
    j.homes[3] = "n0"
    j.enter()
    fetching = j.nodes["n0"].companions["peer"]._fetching
    for _ in range(2000):
        j.turn(steps=False)
        if any(each.transfer for each in fetching._under):
            break
    for _ in range(seed):
        j.turn(steps=False)
    j.kill_porter(side)
    for _ in range(4000):
        j.turn(steps=False)
        if j.all_begun and not j._entering:
            break
    assert {worker.began for worker in j.workers.values()} == {(newest, 0)}
    assert not [e for node in j.alive for e in node.events if getattr(e, "what", "") == "damaged"]


def led(domains):
    """The leader of a world of two ranks on nodes a and b, and what it says."""
    said, node = [], SimNode("a", Net(), StillClock(), {})
    leader = Leader(node, lambda to, message: said.append((to, message["kind"])), interval=1, copies=1)
    leader.begin((0, 0), {0: "a", 1: "b"}, domains, {}, -1, None, lambda: 0)
    return leader, lambda: [to for to, kind in said if kind == "peer.intent"]


def test_nothing_is_saved_while_a_rank_has_no_keeper():
    leader, intents = led({"b": "b"})
    leader.ready("b", 0)
    assert intents() == [], "of node b nobody would keep anything"
    leader.on_domains({"a": "a", "b": "b"})
    leader.ready("a", 1)
    assert intents() == []
    leader.ready("b", 0)
    assert intents() == ["a", "b"]


def test_what_follows_a_save_that_other_nodes_have_ended_is_for_these_nodes():
    leader, intents = led({"a": "a", "b": "b", "c": "c"})
    for rank, keepers in leader.placement.items():
        leader.ready(keepers[0], rank)
    assert intents() == ["a", "b"]
    leader.on_domains({"a": "a", "b": "b"})
    assert intents() == ["a", "b"], "none before the keepers of this placement have room"
    leader.ready("b", 0)
    leader.ready("a", 1)
    assert intents() == ["a", "b"] * 2


def test_what_counts_is_told_before_a_roster_and_nothing_comes_to_count_behind_it(job):
    j = job(20, nodes=2, per_node=1)
    j.begin()
    until_counted(j, 4)
    first = j.nodes[j.homes[0]]
    for _ in range(2000):
        save = first.companions["peer"]._leader._save
        if save is not None and save.phase is Phase.SENDING and first.name in {node for _, node in save.kept}:
            break  # of another node's copy nothing has been said yet
        j.turn()
    counted = j.counted()
    told = first.companions["snapshot"].telling()["counted"]
    j.settle()
    assert told[0] == counted == j.counted() < save.step


def test_memory_that_does_not_suffice_for_copies_is_said_and_training_goes_on(job):
    own = 2 * 5 * 4616
    j = job(10, cap_bytes=own)
    j.begin()
    j.run(1500)
    assert j.counted() == -1
    texts = [text for node in j.alive for text in node.notices()]
    assert any("no copies of snapshots are kept: node n" in text and "--snapshot-memory" in text for text in texts)
    assert min(worker.step for worker in j.workers.values()) > 20


def test_where_memory_is_short_the_ranks_go_before_the_copies(job):
    j = job(11, look=lambda: Memory(2 * 3 * 4616 * 16 // 15 + 64))
    j.begin()
    j.run(500)
    assert j.counted() == -1
    assert min(worker.step for worker in j.workers.values()) > 5
    assert any("no copies of snapshots are kept" in text for node in j.alive for text in node.notices())


def test_steps_between_saves_are_left_out_in_choosing_and_no_rank_ever_waits(job):
    j = job(12, interval=2)
    j.begin()
    until_counted(j, 12)
    events = [(e.what, e.step) for e in j.nodes["n0"].events if getattr(e, "tier", "") == "peer"]
    assert all(step % 2 == 0 for _, step in events)
    committed = [step for what, step in events if what == "committed"]
    assert committed == sorted(set(committed))
    assert {what for what, _ in events} >= {"planned", "taken", "committed"}


def test_a_porter_that_dies_fails_what_was_under_way_and_another_takes_its_place(job):
    j = job(13)
    j.begin()
    until_counted(j, 3)
    j.kill_porter("n1")
    until_counted(j, j.counted() + 5)
    assert any("porter of this node ended by signal 9; another takes its place" in t for t in j.nodes["n1"].notices())


def test_words_that_are_lost_between_agents_cost_time_alone(job):
    for seed in range(3):
        j = job(seed, nodes=3, per_node=1, losing=0.02)
        j.begin()
        until_counted(j, 3, turns=6000)
        j.kill_node("n1")
        j.begin()


def test_nonsense_from_another_node_is_told_and_changes_nothing(job):
    j = job(14)
    j.begin()
    until_counted(j, 2)
    n0 = j.nodes["n0"]
    draw = random.Random(1)
    kinds = ["here", "placed", "keep", "ready", "no", "intent", "staged", "late", "go", "offer", "come", "declined",
             "kept", "refused", "done", "fetch", "unfetched", "not_here", "something"]  # fmt: skip
    for kind in kinds:
        for body in (
            {},
            {"save": 7},
            {"rank": "x", "roster": 3, "save": None, "place": [1], "what": {}, "ticket": "t"},
        ):
            n0.companions["peer"].on_node_message("n1", {"kind": f"peer.{kind}", **body})
    for kind in ("facts", "plan", "facts_wanted", "something"):
        for body in ({}, {"roster": draw.random(), "copies": 3}, {"roster": [0, 0], "copies": [[1]], "sources": 1}):
            n0.companions["snapshot"].on_node_message("n1", {"kind": f"snapshot.{kind}", **body})
    j.run(200)
    j.kill_worker(0)
    j.begin()


def test_a_world_that_shrinks_to_one_node_takes_up_what_all_ranks_had_with_the_copies_that_it_keeps(job):
    j = job(16, nodes=2, per_node=1)
    j.begin()
    until_counted(j, 4)
    counted, left = j.counted(), j.nodes["n0"]
    j.kill_node("n1")
    opened = []
    left.workers[0] = lambda message, fds: (opened.append(message), [os.close(fd) for fd in fds])
    left.nodes(["n0"])
    left.stop(0)
    told = {}
    left.enter(roster(1, {0: "n0"}), told.__setitem__)
    shelf = left.companions["snapshot"]
    assert told[0]["snapshot"]["restore"] == {"step": counted, "tier": "memory", "saved_by": 2, "from": "peer"}
    assert told[0]["snapshot"]["world"] == {"step": counted, "tier": "peer"}
    assert "1 rank takes it up" in shelf.plan.reason
    shelf.on_message(0, {"kind": "snapshot.open", "ask": 1}, ())
    j.settle()
    assert [m["ranks"] for m in opened if m["kind"] == "snapshot.opened"] == [[0, 1]]
    shelf.on_message(0, {"kind": "snapshot.settled"}, ())
    assert {each.rank for each in shelf._sets.values()} == {0}


class Smaller:
    """A world of another size on the nodes that are left; its ranks are played by hand."""

    def __init__(self, job, homes, all_hear=False):
        self.job, self.homes, self.opened, self.told = job, homes, {}, {}
        names = [node.name for node in job.alive]
        for worker in list(job.workers.values()):
            worker.close()
        job.workers.clear()
        for node in job.alive:
            node.workers.clear()
            for rank in [rank for rank, home in homes.items() if home == node.name]:
                node.workers[rank] = functools.partial(self.hear, rank)
        if all_hear:
            for node in job.alive:
                node.nodes(names)
            job._tell_all()
        for node in job.alive:
            node.nodes(names)
            node.stop(job.generation)
            node.enter(roster(job.generation + 1, homes), lambda rank, message: None)
        for rank in homes:
            self.say(rank, {"kind": "snapshot.attach", "ask": 1, "bytes": job.size, "have": []})
        self.settle()

    def settle(self):
        for _ in range(300):
            self.job.turn(steps=False)

    def shelf(self, rank):
        return self.job.nodes[self.homes[rank]].companions["snapshot"]

    def say(self, rank, message):
        self.shelf(rank).on_message(rank, message, ())

    def hear(self, rank, message, fds):
        if message["kind"] == "snapshot.buffers":
            self.told[rank] = message.get("told")
        if message["kind"] == "snapshot.opened":
            held = [segment.parse(os.pread(fd, self.job.size, 0)) for fd in fds]
            states = [os.pread(fd, 512, 4096) for fd in fds]
            self.opened[rank] = [(h.rank, h.step, h.generation, state) for h, state in zip(held, states, strict=True)]
        for fd in fds:
            os.close(fd)

    def open(self, rank):
        self.say(rank, {"kind": "snapshot.open", "ask": 2})
        self.settle()
        return self.opened[rank]


@pytest.mark.parametrize("all_hear", [True, False])
def test_a_world_that_shrinks_onto_several_nodes_takes_up_what_all_ranks_had(job, all_hear):
    j = job(18, nodes=3, per_node=1)
    j.begin()
    until_counted(j, 4)
    step = j.counted()
    j.kill_node("n1")
    j.settle()
    left = Smaller(j, {0: "n0", 1: "n2"}, all_hear=all_hear)
    source = {"step": step, "tier": "memory", "saved_by": 3, "from": "peer"}
    assert [left.told[rank]["restore"] for rank in (0, 1)] == [source, source]
    whole = [(rank, step, 0, payload(rank, step, 0)) for rank in range(3)]
    assert left.open(0) == whole
    left.say(0, {"kind": "snapshot.settled"})
    left.settle()
    assert left.open(1) == whole, "one node is done, and what the other needs is still there"
    assert left.open(0) == whole
    left.say(1, {"kind": "snapshot.settled"})
    left.settle()
    for rank in (0, 1):
        assert {each.rank for each in left.shelf(rank)._sets.values()} == {rank}


def test_who_is_slow_to_fetch_finds_what_it_is_to_go_on_from_where_others_have_long_gone_on(job):
    """A replica that its keeper goes on from itself is handed out as well, and so is what a rank there had."""
    j = job(19, nodes=3, per_node=1)
    j.begin()
    until_counted(j, 4)
    j.kill_node("n1")
    j.settle()
    fetch = j.nodes["n2"].companions["peer"].fetch
    asked = []
    j.nodes["n2"].companions["peer"].fetch = lambda copy, done: asked.append((copy, done))
    left = Smaller(j, {0: "n0", 1: "n2"})
    assert {copy.node for copy, _ in asked} == {"n0"}
    assert len(left.open(0)) == 3
    left.say(0, {"kind": "snapshot.settled"})
    left.settle()
    for copy, done in asked:
        fetch(copy, done)
    left.settle()
    assert [rank for rank, *_ in left.open(1)] == [0, 1, 2]
    assert not [e for node in j.alive for e in node.events if getattr(e, "what", "") == "damaged"]


class Storm:
    """A job, and what becomes of it."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.job = Job(
            seed, draw.choice([2, 2, 3, 4]), draw.choice([1, 2]), interval=draw.choice([1, 1, 2, 5]),
            copies=draw.choice([1, 1, 2]), losing=draw.choice([0.0, 0.0, 0.02]),
            all_hear=draw.random() < 0.5,
        )  # fmt: skip
        self.log, self.sound, self.spent = [], True, -1

    def run(self):
        try:
            self.job.begin()
            for _ in range(self.draw.randint(2, 6)):
                self.job.run(self.draw.randint(5, 400))
                getattr(self, self.draw.choice(["fault", "fault", "fault", "porter", "flip", "node", "node"]))()
        finally:
            self.job.close()

    def anyone(self):
        return self.draw.choice([node.name for node in self.job.alive])

    def porter(self):
        self.job.kill_porter(self.anyone())

    def flip(self):
        self.sound = not self.job.flip(self.anyone()) and self.sound

    def fault(self):
        newest = min(worker.step for worker in self.job.workers.values())
        if self.draw.random() < 0.7:
            self.job.kill_worker(self.draw.randrange(self.job.ranks))
        self.begin("fault", newest if self.sound else -1)

    def node(self):
        counted = self.job.counted()
        if len(self.job.alive) > 1:
            self.job.kill_node(self.anyone())
            self.begin("node", counted if self.sound and counted > self.spent else -1)
            self.spent = self.job.counted()  # the next may take what only it had, until a newer save counts

    def begin(self, what, least):
        self.job.begin()
        self.log.append((what, least, self.job.begun[-1]))
        if self.job.begun[-1][0] < least:
            raise Broken(f"more is lost than may be: {self.log}")


def storm(seed):
    Storm(seed).run()


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(30))
def test_whatever_dies_whenever_all_begin_from_one_state_and_nothing_that_counted_is_lost(seed):
    gc.collect()
    before = memfds()
    storm(seed)
    gc.collect()
    assert memfds() == before, "memory is left behind"


@pytest.mark.long
@pytest.mark.parametrize("block", range(60))
def test_whatever_dies_at_length(block):
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        storm(seed)
