"""Worlds without an agent, simulated from seeds: ranks fail, die and complete, words are under way as long as chance
has it. Whatever happens, all that live come to the same rosters and to the same end."""

import random
from collections import deque

import pytest

from everstep.launcher.peers.core import facts
from everstep.launcher.peers.core.books import Books
from everstep.launcher.peers.core.ending import beyond_mending
from everstep.recovery.core import words, world
from everstep.recovery.core.words import Facts, Incarnation, Policy


class Rank:
    """A worker and its watcher: steps the machine with what the hub sends, and acts as a worker would."""

    def __init__(self, rank, size, policy):
        self.rank, self.me = rank, Incarnation("b", 100 + rank, 1)
        self.facts = Facts(f"rank-{rank:07d}", 0, fresh=True)
        self.view = world.begin(self.facts.node, policy)
        self.up, self.down = deque(), deque()  # words on their way to the hub, and from it
        self.alive, self.running, self.ended = True, -1, None
        self.rosters, self.owes = {}, None
        self.up.append((facts.encode(words.Announced(self.me, self.facts)), None))

    def hear(self, body):
        event = self.view.death_of(self.me_of(body), 256) if body["is"] == "gone" else facts.decode(body)
        inbox = deque([event])
        while inbox and self.ended is None:
            self.view, commands = world.step(self.view, inbox.popleft(), 0.0)
            for command in commands:
                self.do(command, inbox)
            self.ended = self.ended or beyond_mending(self.view) or None

    @staticmethod
    def me_of(body):
        return Incarnation.parse(body["incarnation"])

    def do(self, command, inbox):
        match command:
            case words.Publish(roster):
                self.up.append((facts.encode(words.Published(roster)), f"roster/{roster.generation}"))
            case words.Enter(roster):
                self.rosters[roster.generation] = roster
                self.running = roster.generation
            case words.Stop(who, generation) if who == self.me:
                self.running, self.owes = -1, generation + 1
            case words.Drain(generation):
                inbox.append(words.Drained(generation))
            case words.Finish():
                self.ended = "done"
            case words.End(_, reason):
                self.ended = reason
            case _:
                pass


class Peers:
    """The hub and all ranks; `turn` lets one thing happen."""

    def __init__(self, seed, size, least, faults, deaths):
        self.chance = random.Random(seed)
        policy = Policy(size, local_world_size=1, min_world_size=least, max_restarts=1000)
        self.books = Books("j", size)
        self.ranks = [Rank(rank, size, policy) for rank in range(size)]
        self.faults, self.deaths = faults, deaths
        for rank in self.ranks:
            told = {"job": "j", "rank": rank.rank, "world_size": size, "incarnation": str(rank.me)}
            assert self.books.join(rank.rank, told, 0.0) == ""

    def turn(self):
        living = [rank for rank in self.ranks if rank.alive and rank.ended is None]
        choices = [(self.take_up, rank) for rank in self.ranks if rank.up]
        choices += [(self.take_down, rank) for rank in living if rank.down]
        choices += [(self.work, rank) for rank in living if rank.running >= 0 or rank.owes is not None]
        choices += [(self.die, rank) for rank in living if self.deaths and self.chance.random() < 0.02]
        if not choices:
            return False
        act, rank = self.chance.choice(choices)
        act(rank)
        return True

    def take_up(self, rank):
        self.say(*rank.up.popleft())

    def say(self, body, key):
        if self.books.say(body, key):
            for peer in self.ranks:
                peer.down.append(body)

    def take_down(self, rank):
        rank.hear(rank.down.popleft())

    def work(self, rank):
        if rank.owes is not None:
            arrived = words.Arrived(rank.owes, rank.me, Facts(rank.facts.node, 0, fresh=False))
            rank.up.append((facts.encode(arrived), None))
            rank.owes = None
            return
        generation, rank.running = rank.running, -1
        if self.faults and self.chance.random() < 0.5:
            self.faults -= 1
            fault = words.Fault(generation, "exception", "worker", rank.me, rank.rank, generation)
            rank.up.append((facts.encode(words.Faulted(fault)), None))
        else:
            rank.up.append((facts.encode(words.Completed(generation, rank.me)), None))

    def die(self, rank):
        """What it has said may be lost with it; the end of its connection comes after what was not."""
        self.deaths -= 1
        rank.alive = False
        for _ in range(self.chance.randint(0, len(rank.up))):
            rank.up.pop()
        rank.up.append(({"is": "gone", "incarnation": str(rank.me)}, None))

    def run(self):
        for _ in range(20_000):
            if not self.turn():
                return
        raise AssertionError("it never comes to rest")


def at_length(count):
    return pytest.param(count, marks=pytest.mark.long)


def check(peers):
    living = [rank for rank in peers.ranks if rank.alive]
    rosters = {}
    for rank in peers.ranks:
        for generation, roster in rank.rosters.items():
            assert rosters.setdefault(generation, roster) == roster, "two rosters for one generation"
            assert [m.rank for m in roster.members] == list(range(roster.world_size))
    assert all(rank.ended for rank in living), [(r.rank, r.view.phase, r.ended) for r in living]
    ends = {rank.ended for rank in living}
    assert len(ends) <= 1, ends
    return ends.pop() if ends else "nobody"


@pytest.mark.parametrize("count", [60, at_length(200)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_exceptions_alone_always_end_well(size, count):
    for seed in range(count):
        peers = Peers(seed, size, None, faults=seed % 7, deaths=0)
        peers.run()
        assert check(peers) == "done", seed


@pytest.mark.parametrize("count", [120, at_length(400)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_death_ends_all_that_live_alike(size, count):
    ends = set()
    for seed in range(count):
        peers = Peers(seed, size, None, faults=seed % 4, deaths=1)
        peers.run()
        ends.add(check(peers).partition(" ")[0])
    assert {"done", "rank"} <= ends  # a death may come too late, or never


@pytest.mark.parametrize("count", [100, at_length(400)])
@pytest.mark.parametrize("size", [3, 5])
def test_worlds_that_may_shrink_go_on_or_end_alike(size, count):
    shrunk = 0
    for seed in range(count):
        peers = Peers(seed, size, 2, faults=seed % 4, deaths=size - 1)
        peers.run()
        check(peers)
        shrunk += any(r.world_size < size for rank in peers.ranks for r in rank.rosters.values())
    assert shrunk > count // 4
