"""The memory tier without an agent: several shelves, one rank each, that know of each other what was told."""

import os

import pytest

from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.segment import Header, seal, unseal, write
from everstep.checkpoint.peer_shelf import PeerShelf, make
from everstep.recovery.core.words import Incarnation, Member, Roster

PLENTY = Memory(8 << 30)
SIZE = 1 << 16


class Host:
    """What a watcher offers, for one rank."""

    run_dir, clock = "", None

    def __init__(self, rank, size):
        self.rank, self.world_size, self.sent, self.events = rank, size, [], []

    def send(self, rank, message, fds=()):
        assert rank == self.rank
        self.sent.append(message)

    def emit(self, event):
        self.events.append(event)

    def later(self, delay_s):
        pass

    def recheck(self):
        pass


class World:
    """Ranks that train together: each has a shelf; what one tells, all hear."""

    def __init__(self, size, looks=None):
        self.hosts = [Host(rank, size) for rank in range(size)]
        self.shelves = [PeerShelf(size) for _ in range(size)]
        self.generation, self.alive = -1, list(range(size))
        for rank, shelf in enumerate(self.shelves):
            shelf._look = lambda: PLENTY
            shelf.start(self.hosts[rank])

    def enter(self):
        """Everybody who lives leaves, tells, hears, and begins the next generation; returns what each was told."""
        if self.generation >= 0:
            words = [(rank, self.shelves[at].telling()) for rank, at in enumerate(self.alive)]
            for at in self.alive:
                for rank, told in words:
                    self.shelves[at].told(rank, told)
        self.generation += 1
        members = tuple(
            Member(r, Incarnation("b", 100 + a, 1), "n", r, False, "kept") for r, a in enumerate(self.alive)
        )
        roster = Roster(0, self.generation, members)
        told = [self.shelves[at].on_roster(roster) for at in self.alive]
        assert all(each == told[0] for each in told)  # all choose alike
        self.parents = [told[0][rank]["lineage"][2] for rank in told[0]]
        for rank, at in enumerate(self.alive):
            self.hosts[at].rank = rank
            ask = {"kind": "snapshot.attach", "ask": self.generation, "bytes": SIZE, "have": []}
            self.shelves[at].on_message(rank, ask, ())
            assert self.hosts[at].sent[-1]["kind"] == "snapshot.buffers"
        return told[0]

    def take(self, rank, step):
        """The worker of `rank` seals a snapshot of `step`, in the buffer that rotation gives it."""
        shelf = self.shelves[self.alive[rank]]
        segments = [s for each in shelf._sets.values() if each.rank == rank for s in each.segments.values()]
        sequence = 1 + max((h.sequence for s in segments if not isinstance(h := s.header(), str)), default=0)
        oldest = min(segments, key=lambda s: 0 if isinstance(h := s.header(), str) else h.sequence)
        with memoryview(oldest._map) as view:
            unseal(view)
            header = Header(sequence, step, 0, self.generation, self.parents[rank], rank, len(self.alive), 0, 0)
            write(view, header, b"")
            seal(view, sequence)


@pytest.fixture
def world():
    made = []

    def make_world(size):
        made.append(World(size))
        return made[-1]

    yield make_world
    for each in made:
        for shelf in each.shelves:
            shelf.close()


def test_all_go_on_from_the_newest_step_that_all_hold(world):
    w = world(3)
    assert {told["restore"] for told in w.enter().values()} == {None}
    for step in range(5):
        for rank in range(3):
            if (rank, step) != (1, 4):
                w.take(rank, step)
    told = w.enter()
    assert {rank: (t["restore"]["step"], t["restore"]["tier"]) for rank, t in told.items()} == dict.fromkeys(
        range(3), (3, "memory")
    )
    assert "step 4 is not whole" in told[0]["reason"]


def test_what_a_rollback_left_behind_is_never_chosen(world):
    w = world(2)
    w.enter()
    for step in range(4):
        w.take(0, step)
        w.take(1, step)
    w.take(0, 4)  # rank 1 fails in its step 4
    assert w.enter()[0]["restore"]["step"] == 3
    w.take(1, 4)  # rank 0 fails in its step 4: its buffer of step 4 is of the former generation
    told = w.enter()
    assert {t["restore"]["step"] for t in told.values()} == {3}


def test_what_could_not_be_read_is_struck_out_on_every_rank(world):
    w = world(2)
    w.enter()
    for step in range(3):
        w.take(0, step)
        w.take(1, step)
    told = w.enter()
    assert told[1]["restore"]["step"] == 2
    damaged = {"kind": "snapshot.damaged", "buffer": told[1]["restore"]["buffer"], "step": 2, "why": "a flipped byte"}
    w.shelves[1].on_message(1, damaged, ())
    told = w.enter()
    assert {t["restore"]["step"] for t in told.values()} == {1}
    assert w.enter()[0]["restore"]["step"] == 1  # and it does not come back


def test_a_rank_that_keeps_nothing_sends_all_to_the_beginning(world):
    w = world(2)
    w.enter()
    w.take(0, 0)
    w.take(0, 1)
    told = w.enter()
    assert [t["restore"] for t in told.values()] == [None, None]
    assert "no snapshot of rank 1" in told[0]["reason"]


def test_a_smaller_world_begins_anew_and_keeps_no_buffer_of_the_larger(world):
    w = world(3)
    w.enter()
    for rank in range(3):
        w.take(rank, 0)
    w.alive = [0, 2]  # rank 1 is dead, rank 2 moves down
    told = w.enter()
    assert [t["restore"] for t in told.values()] == [None, None]
    assert [each.rank for each in w.shelves[2]._sets.values()] == [1]
    for rank in range(2):
        w.take(rank, 0)
    assert {t["restore"]["step"] for t in w.enter().values()} == {0}


def test_memory_is_judged_for_the_whole_node_and_the_neighbours_are_not_counted_twice():
    shelf = make({"neighbours": 4, "cap_bytes": None})
    free = iter([Memory(16 << 20), Memory(5 << 20), Memory(5 << 20)])
    shelf._look = lambda: next(free)
    host = Host(0, 4)
    shelf.start(host)
    member = Member(0, Incarnation("b", 1, 1), "n", 0, False, "kept")
    shelf.on_roster(Roster(0, 0, (member,)))
    shelf.on_message(0, {"kind": "snapshot.attach", "ask": 1, "bytes": 1 << 20, "have": []}, ())
    assert host.sent[-1]["kind"] == "snapshot.buffers"  # 12 MiB of 16 for all, 3 MiB of 5 for this one
    shelf.on_message(0, {"kind": "snapshot.attach", "ask": 2, "bytes": 2 << 20, "have": []}, ())
    assert host.sent[-1]["kind"] == "snapshot.refused"
    assert "this machine has available" in host.sent[-1]["text"]
    shelf.close()


def test_the_cap_is_the_nodes():
    shelf = make({"neighbours": 2, "cap_bytes": 4 << 20})
    shelf._look = lambda: PLENTY
    host = Host(0, 2)
    shelf.start(host)
    shelf.on_message(0, {"kind": "snapshot.attach", "ask": 1, "bytes": 1 << 20, "have": []}, ())
    assert host.sent[-1]["kind"] == "snapshot.refused"
    assert "--snapshot-memory leaves 2.0 MiB" in host.sent[-1]["text"]
    shelf.close()


def test_descriptors_end_with_the_shelf(world):
    before = len(os.listdir("/proc/self/fd"))
    w = World(2)
    w.enter()
    for shelf in w.shelves:
        shelf.close()
    assert len(os.listdir("/proc/self/fd")) == before
