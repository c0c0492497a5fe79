"""Several tiers read one rank's buffers at their own pace: what one of them asked for is not freed by another.

The snapshotter, the shelf, the shares and the ranks' clients are the real ones; what travels between them is late.
"""

import random
from collections import deque

import pytest
import torch

from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.intent_client import DIRECTORIES, Disks
from everstep.checkpoint.shares import shares
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter, Taken
from everstep.checkpoint.tier_client import TierClient
from everstep.testing.loopback import LoopbackHost

NAMES = ("disk", "local", "far")


class Tier:
    """Reads what it is given, for as long as it likes."""

    def __init__(self, name, share, world):
        self.name, self.share, self.world = name, share, world
        self.asks, self.open = 0, False
        self.parked = None
        self.reading = None  # buffer, header

    def ask(self, number):
        self.asks, self.open = self.asks + 1, True
        self.world.to_worker.append({"kind": f"{self.name}.want", "ask": self.asks, "number": number})

    def hear(self, verb, message):
        if verb == "offer":
            if message["hold"]:
                self.unpark()
                self.parked = message["buffer"], message["hold"]
            return
        self.unpark()
        self.open = False
        if verb == "staged":
            self.share.hold(0, message["buffer"], message["hold"])
            self.reading = message["buffer"], self.world.staged.pop((self.name, message["ask"]))

    def unpark(self):
        if self.parked is not None:
            self.share.release(0, *self.parked)
            self.parked = None

    def finish(self):
        (buffer, header), self.reading = self.reading, None
        assert self.world.shelf.header(0, buffer) == header, f"{self.name}: overwritten while it was read"
        self.share.release(0, buffer)


class World:
    """One rank, its shelf, and as many tiers as `count`."""

    def __init__(self, seed, count):
        self.rng = random.Random(seed)
        self.to_agent, self.to_worker = deque(), deque()
        self.staged = {}  # what a buffer held when its rank said that it keeps it
        self.shelf = Shelf(readers=count, look=lambda: Memory(8 << 30))
        host = LoopbackHost(self.shelf)
        told = host.enter()[0]
        direct = host.from_worker(0)
        self.late = False
        self.worker = Snapshotter(lambda message: self.to_agent.append(message) if self.late else direct(message))
        host.receivers[0] = lambda message, fds: (
            self.to_worker.append(message) if self.late else self.worker.on_message(message, fds)
        )
        self.worker.begin(0, 1, told)
        self.worker.bind({"state": Box()})
        self.late = True
        parts = shares(self.shelf, count)
        self.tiers = {name: Tier(name, share, self) for name, share in zip(NAMES, parts, strict=False)}
        self.clients = {
            name: TierClient(name, self._say, self.worker, self, told=name == NAMES[0]) for name in self.tiers
        }
        self.number = 0

    def add(self, texts):
        raise AssertionError(texts)

    def settle(self, *_, **__):
        return

    def _say(self, message):
        name, _, verb = message["kind"].partition(".")
        if verb == "staged":
            self.staged[name, message["ask"]] = self.shelf.header(0, message["buffer"])
        self.to_agent.append(message)

    def save(self):
        self.number += 1
        taken = self.worker.take(self.number, hold=self.rng.random() < 0.7)
        for client in self.clients.values():
            client.taken(self.number, self.number, taken, due=True, metrics={})

    def arrive_at_agent(self):
        message = self.to_agent.popleft()
        name, _, verb = message["kind"].partition(".")
        if name == "snapshot":
            self.shelf.on_message(0, message, ())
        else:
            self.tiers[name].hear(verb, message)

    def arrive_at_worker(self):
        message = self.to_worker.popleft()
        name = message["kind"].partition(".")[0]
        if name == "snapshot":
            self.worker.on_message(message, ())
        else:
            self.clients[name].on_message(message)

    def moves(self):
        moves = [self.save]
        moves += [self.arrive_at_agent] * 3 if self.to_agent else []
        moves += [self.arrive_at_worker] * 3 if self.to_worker else []
        for tier in self.tiers.values():
            if tier.reading is not None:
                moves.append(tier.finish)
            elif not tier.open:
                moves.append(lambda tier=tier: tier.ask(self.number + self.rng.choice([0, 0, 0, -1, 1])))
        return moves

    def end(self):
        """Nobody wants anything any more: what is open comes to its end."""
        for _ in range(3):
            self.save()  # to whatever was asked ahead
        while self.to_agent or self.to_worker or any(tier.reading for tier in self.tiers.values()):
            while self.to_agent:
                self.arrive_at_agent()
            while self.to_worker:
                self.arrive_at_worker()
            for tier in self.tiers.values():
                tier.unpark()
                if tier.reading is not None:
                    tier.finish()

    def close(self):
        self.worker.close()
        self.shelf.close()


class Box:
    def __init__(self):
        self.value = torch.zeros(4)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def run(seed, count, moves=150):
    world = World(seed, count)
    try:
        for _ in range(moves):
            world.rng.choice(world.moves())()
        world.end()
        assert world.shelf.held(0) == frozenset(), "a buffer is kept for nobody"
        assert world.worker._open == {}, "the worker keeps a buffer for nobody"
    finally:
        world.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_one_tier_keeps_is_not_freed_by_another(count):
    for seed in range(15):
        run(seed, count)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_one_tier_keeps_is_not_freed_by_another_at_length(count):
    for seed in range(1000, 1200):
        run(seed, count)


def test_a_tier_that_is_done_between_another_s_hold_and_its_word_frees_nothing():
    """The shortest story: both want one snapshot, and the first is done when of the second only the hold has come."""
    world = World(0, 2)
    try:
        first, second = world.tiers.values()
        taken = world.worker.take(1)
        world.number = 1
        for client in world.clients.values():
            client.taken(1, 1, taken, due=True, metrics={})
        first.ask(1)
        world.arrive_at_worker()
        while world.to_agent:
            world.arrive_at_agent()
        second.ask(1)
        world.arrive_at_worker()
        world.arrive_at_agent()  # the hold
        first.finish()
        while world.to_worker:
            world.arrive_at_worker()
        for step in range(2, 10):
            assert world.worker.take(step).buffer != taken.buffer
        world.arrive_at_agent()  # the word
        second.finish()
        while world.to_worker:
            world.arrive_at_worker()
        assert taken.buffer in {world.worker.take(step).buffer for step in range(10, 15)}
    finally:
        world.close()


def test_a_hold_told_while_buffers_are_asked_for_is_not_forgotten():
    """The line's thread keeps a buffer for a tier while the main thread waits for larger ones."""
    world = World(0, 2)
    try:
        world.late = False
        worker = world.worker
        taken = worker.take(1)
        numbers = []
        send = worker._send

        def slow(message):
            send(message)
            if message["kind"] == "snapshot.attach":
                numbers.append(None)

        worker._send = slow
        reply = worker._reply

        def replied():
            answer = reply()
            numbers[-1] = worker.keep(taken.buffer, taken.sequence)
            return answer

        worker._reply = replied
        worker._attach(1 << 20)
        assert numbers[0] > 0
        assert taken.buffer in worker._open
        assert worker._open[taken.buffer] == {numbers[0]}
    finally:
        world.close()


def test_directories_that_want_one_step_hold_it_each_for_itself():
    """The first gives it up (its save is void) before the other has taken it: it stays."""
    world = World(0, 2)
    try:
        near, main = world.tiers.values()
        told = []
        disks = Disks(told.append)
        for tier in DIRECTORIES:
            disks.on_message({"kind": f"{tier}.intent", "save": tier, "step": 1})
        assert disks.due(1)
        taken = world.worker.take(1, hold=True)
        disks.staged(taken.buffer, world.worker.holds(taken))
        while world.to_agent:
            world.arrive_at_agent()
        first, second = [message["hold"] for message in told]
        assert first != second
        near.share.release(0, taken.buffer, first)
        while world.to_worker:
            world.arrive_at_worker()
        assert taken.buffer not in {world.worker.take(step).buffer for step in range(2, 12)}
        main.share.hold(0, taken.buffer, second)
        main.share.release(0, taken.buffer)
        while world.to_worker:
            world.arrive_at_worker()
        assert taken.buffer in {world.worker.take(step).buffer for step in range(12, 18)}
        assert world.worker.holds(Taken(9, 0, 1, 0.0))() == 0
    finally:
        world.close()
