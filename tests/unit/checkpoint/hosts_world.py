"""Worlds of several hosts in one process: real keepers, shelves, snapshotters and scribes, and no process, no network.

What a rank says to its keeper, what keepers say to one another, what writers do and what timers are due travels when
`World.turn` draws it: in order from one to another, in any order otherwise. A host, a rank, a keeper, a writer may die
at any turn; what it had said by then is heard in part. All files are real.
"""

import functools
import json
import os
import random
import socket
from collections import deque

import torch

from everstep.checkpoint import place_seen, writers
from everstep.checkpoint.core.hosts import arrange
from everstep.checkpoint.deputy import Deputy
from everstep.checkpoint.given import given
from everstep.checkpoint.handles import Book
from everstep.checkpoint.keeper import Keeper
from everstep.checkpoint.keeper_claims import ENTRY as HOLDER
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.scribe import Scribe
from everstep.checkpoint.snapshot import Snapshotter
from everstep.checkpoint.sole_holder import sole
from everstep.checkpoint.stocktaking import take_stock
from everstep.checkpoint.tier_client import TierClient
from everstep.checkpoint.tier_settings import settings_of
from everstep.errors import DamagedCheckpoint
from everstep.process.loop import Timer
from everstep.recovery.link import Link
from everstep.testing.disk_bench import no_metadata
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.nodes import StillClock

BETWEEN = 0.05
TURNS = 200_000


class StubLoop:
    """A loop that does what it is told: timers are fired by the world."""

    def __init__(self, world):
        self.world, self.clock, self.running = world, world.clock, True
        self.timers = []

    def watch(self, fd, call, *, write=False):
        """Nothing comes by itself."""

    def unwatch(self, fd, *, write=False):
        """Nothing came."""

    def later(self, delay_s, call):
        timer = Timer(self.clock.now() + delay_s, next(self.world.numbers), call)
        self.timers.append(timer)
        return timer

    def stop(self):
        self.running = False

    def due(self):
        return [timer for timer in self.timers if timer.when <= self.clock.now()] if self.running else []

    def fire(self, timer):
        self.timers.remove(timer)
        timer.call()


class Helper:
    """A writer that answers when it is drawn, or one who has answered already; `recovery.api.Child`."""

    def __init__(self, hands, name, owner):
        self.hands, self.name, self.owner, self.pid = hands, name, owner, 0
        self.link = self.scribe = self.held = None
        self.said = deque()

    def write_for(self, directory, rank):
        self.link, theirs = Link.pair()
        self.theirs = Link(theirs)
        for end in (self.link, self.theirs):
            end.setblocking(False)
        files = self.hands.world.files(self.hands.host.number)
        self.scribe = Scribe(self.theirs, directory, rank, files, no_metadata, {"torch": "none"})

    def send(self, message, fds=()):
        if self.link is not None:
            self.link.send(message, fds)
        elif self.held is not None and message["kind"] == "ending":
            self.held.ending()

    def kill(self):
        self.hands.gone(self, -9)

    def work(self):
        """Do one order, or hand on what was said; False where there is nothing to do."""
        if self.said:
            self.owner.on_child_message(self, self.said.popleft(), [])
            return True
        if self.scribe is None:
            return False
        try:
            message, fds = self.link.receive()
        except BlockingIOError:
            try:
                return self.scribe.answer()
            except BlockingIOError:
                return False
        self.owner.on_child_message(self, message, fds)
        return True

    def close(self):
        if self.scribe is not None:
            self.scribe.close()
            self.link.close()
            self.theirs.close()
        if self.held is not None:
            self.held.close()


class SimHands:
    """`keeper_hands.Hands` without processes."""

    def __init__(self, host):
        self.host, self.world, self.helpers = host, host.world, []

    def spawn(self, name, entry, arguments, owner):
        helper = Helper(self, name, owner)
        self.helpers.append(helper)
        clock = self.world.clock
        if entry == writers.ENTRY:
            helper.write_for(arguments["directory"], arguments["rank"])
        elif entry == HOLDER:
            where = arguments["directory"]
            helper.held = sole(where, arguments["job"], arguments["who"], clock, lambda: None)
            told = helper.held.take(arguments["who"], arguments["wait_s"], self.world.waits.append)
            findings = take_stock(where, told, limit_s=arguments["grace_s"])
            stock = {"kind": "stock", "lock": helper.held.lock, "findings": json.loads(findings.to_json())}
            helper.said.append(stock)
        elif entry == place_seen.ENTRY:
            text = "; ".join(filter(None, (place_seen.unseen(*one, 0.0, clock) for one in arguments["places"])))
            helper.said.append({"kind": "seen", "text": text})
        return helper

    def reader(self, line, message, visible_s=None):
        line.send(message)

    def patrol(self):
        """Nobody is stopped here."""

    def gone(self, helper, status):
        if helper in self.helpers:
            self.helpers.remove(helper)
            helper.close()
            helper.owner.on_child_exit(helper, status)

    def close(self, by_itself=lambda owner: False):
        helpers, self.helpers = self.helpers, []
        for helper in helpers:
            helper.close()


class SimLine:
    """One end of a line between two keepers; `host_line.HostLine` as they see it."""

    def __init__(self, world):
        self.world, self.open, self.other = world, True, None
        self.on_message = self.on_end = None
        self.queue = deque()  # on its way to us

    def send(self, message, content=b""):
        if self.open and self.other.open:
            self.other.queue.append((json.dumps(message), bytes(content)))

    def deliver(self):
        text, content = self.queue.popleft()
        self.on_message(json.loads(text), content)

    def drop(self):
        self.open = False
        self.queue.clear()

    def close(self):
        while self.other.open and self.other.queue:
            self.other.deliver()
        self.drop()


class SimWay:
    """`deputy_way.Way`: the leading keeper is there."""

    def __init__(self, loop, where, who, known, failed):
        world, number = loop.world, who[1]
        ours, theirs = SimLine(world), SimLine(world)
        ours.other, theirs.other = theirs, ours
        host = world.hosts[number]
        host.line, host.leads = ours, theirs
        loop.later(0.0, lambda: (known(ours), world.keeper._far._known(number, theirs)))

    def close(self):
        """It is there already."""


class Speaker:
    """A rank's line as its keeper has it."""

    def __init__(self, rank):
        self.rank = rank

    def send(self, message, fds=()):
        if self.rank.alive:
            self.rank.down.append((json.loads(json.dumps(message)), [os.dup(fd) for fd in fds]))

    def close(self):
        self.rank.hung_up = True


class Rank:
    """One rank: the real snapshotter and client; a restore as `Restorer` leads it, a loop that saves what `World` says.

    What step `s` of attempt `w` leaves behind is in `truth(w, rank, s)` alone.
    """

    def __init__(self, world, host, rank):
        self.world, self.host, self.rank = world, host, rank
        self.alive, self.hung_up, self.phase = True, False, "joining"
        self.up, self.down = deque(), deque()
        self.number = self.step = 0
        self.book, self.handles, self.saved = Book(lambda: ""), {}, {}  # by number
        self.problems, self.lost, self.restored, self.refused = None, "", None, ""
        self.snapshotter = Snapshotter(self.say)  # what it waits for is there before it waits
        self.client = TierClient("disk", self.say, self.snapshotter, self, told=True)
        self.state = {"own": torch.zeros(4, dtype=torch.float64)}

    # what the client calls as the book

    def settle(self, number, step, what, text, *, alone):
        self.book.settle(number, step, what, text, alone=alone)
        if what == "committed":
            self.world.durable(step)

    # words

    def say(self, message):
        self.up.append(json.dumps(message))
        if message["kind"] == "snapshot.attach":
            self.have_buffers()

    def have_buffers(self):
        """A rank that asks for buffers waits for them: the keeper of its own host alone has to do with it."""
        while self.up:
            self.tell()
        for _ in range(1000):
            while self.down:
                message, fds = self.down.popleft()
                self.hear(message, fds)
                if message["kind"] == "snapshot.buffers":
                    return
            timers = self.host.loop.due()
            assert timers, f"rank {self.rank} waits for buffers"
            self.host.loop.fire(timers[0])

    def tell(self):
        message = json.loads(self.up.popleft())
        if self.host.alive and self.host.loop.running:
            self.host.says(self.rank, message)

    def hear_next(self):
        self.hear(*self.down.popleft())

    def hear(self, message, fds=()):
        kind = message["kind"]
        prefix = kind.partition(".")[0]
        if prefix == "snapshot":
            self.snapshotter.on_message(message, fds)
        elif prefix == "disk":
            self.client.on_message(message)
        else:
            getattr(self, f"on_{kind.partition('.')[2]}")(message)

    def on_welcome(self, message):
        self.snapshotter.begin(self.rank, self.world.size, message["told"]["snapshot"])
        self.phase = "welcome"

    def on_refused(self, message):
        self.phase, self.refused = "refused", message["text"]

    def on_lost(self, message):
        self.phase, self.lost = "lost", message["text"]

    def on_waiting(self, message):
        self.world.waits.append(message["text"])

    def ask_to_restore(self, step=None):
        self.client.rewound()
        self.phase = "asks"
        self.say({"kind": "ckpt.restore", "step": step, "ask": 1})

    def on_plan(self, message):
        self.snapshotter.begin(self.rank, self.world.size, message["told"]["snapshot"])
        source = message["told"]["snapshot"]["restore"]
        what, text = "fits", ""
        try:
            self.found = None if source is None else (source["step"], self.read(source))
        except DamagedCheckpoint as error:
            what, text = "damaged", str(error)
            if source["tier"] != "memory":
                self.client.damaged(int(source["step"]), text)
        self.say({"kind": "ckpt.checked", "what": what, "text": text, "ask": 1})

    def read(self, source):
        if source["tier"] == "memory":
            self.snapshotter.bind(given(self.state).objects)
            layout, payload = self.snapshotter.source()
            return value_of(layout, lambda leaf: bytes(payload(leaf)))
        return read(source["path"], self.rank, self.world.size)

    def on_go(self, message):
        self.phase, self.restored = "runs", self.found
        self.step = self.found[0] if self.found else 0
        self.snapshotter.bind(given(self.state).objects)

    def on_misfit(self, message):
        self.phase, self.refused = "misfit", message["text"]

    def save(self, step, *, due=True):
        self.step = step
        self.state["own"][:] = truth(self.world.attempt, self.rank, step)
        taken = self.snapshotter.take(step, due)
        self.number += 1
        self.saved[self.number] = step
        if due:
            self.handles[self.number] = self.book.open(self.number, step)
        self.client.taken(self.number, step, taken, due=due, metrics={})

    @property
    def fates(self):
        """What became of each save, by number; None: it is not decided."""
        return {number: handle.fate and handle.fate.what for number, handle in self.handles.items()}

    def close(self):
        self.phase = "closing"
        self.say({"kind": "ckpt.close", "ask": 2})

    def on_closed(self, message):
        self.phase, self.problems = "closed", message["problems"]

    def die(self, *, told=True):
        """SIGKILL; what it had said is read before its end is heard of."""
        self.alive = False
        while told and self.up:
            self.tell()
        self.up.clear()
        for _, fds in self.down:
            for fd in fds:
                os.close(fd)
        self.down.clear()
        self.snapshotter.close()
        if told and self.host.alive and self.host.loop.running:
            self.host.keeper.went(self.rank, f"(process {1000 + self.rank}) has ended")


def truth(attempt, rank, step):
    return torch.tensor([attempt, rank, step, 7.0], dtype=torch.float64)


def value_of(layout, payload):
    leaf = next(leaf for leaf in layout.leaves() if leaf.nbytes == 32)
    return torch.frombuffer(bytearray(payload(leaf)), dtype=torch.float64).tolist()


def read(path, rank, world_size):
    with open_checkpoint(path, rank, world_size) as state:
        return value_of(state.layout, lambda leaf: bytes(state.bytes_of(leaf)))


class SimHost:
    """One host: its keeper, its ranks."""

    def __init__(self, world, number):
        self.world, self.number, self.alive = world, number, True
        self.loop, self.hands = StubLoop(world), SimHands(self)
        self.keeper = self.line = self.leads = None
        first, self._theirs = Link.pair()
        door, self._door = socket.socketpair()
        if number == 0:
            far, self._far = socket.socketpair()
            self.keeper = Keeper(self.loop, first, None, far if world.hosts_count > 1 else None, lambda *_: self.hands)
            if world.hosts_count == 1:
                far.close()
            door.close()
        else:
            self._far = None
            self.keeper = Deputy(self.loop, first, door, lambda *_: self.hands, SimWay)
        self._first, self._sockets = first, [self._theirs, self._door, self._far]

    def says(self, rank, message):
        if message["kind"] == "ckpt.hello":
            speaker = Speaker(self.world.ranks[rank])
            assert self.keeper.hello(rank, 1000 + rank, speaker)
            self.keeper._ranks.lines[rank] = speaker
        else:
            self.keeper.said(rank, message)

    @property
    def shelf(self):
        return self.keeper._shelf if self.number else self.keeper._host.shelf

    def close(self):
        if self.loop.running:
            self.hands.close()
        for each in [self._first, *self._sockets]:
            if each is not None:
                each.close()


class World:
    """One attempt of a script: ranks by host, on one directory. `seed`: what is drawn."""

    def __init__(self, directory, homes, seed, attempt, *, on_busy="coalesce", files=lambda host: UnsyncedFiles()):
        self.directory, self.size, self.attempt, self.files = directory, len(homes), attempt, files
        self.random = random.Random(seed)
        self.clock, self.numbers = StillClock(), iter(range(10**9))
        self.waits, self.reported = [], 0
        arranged = arrange({rank: f"host-{home} boot" for rank, home in enumerate(homes)})
        self.hosts_count = len(arranged.names)
        self.hosts = [SimHost(self, number) for number in range(self.hosts_count)]
        self.ranks = [Rank(self, self.hosts[arranged.home[rank]], rank) for rank in range(self.size)]
        settings = settings_of(directory, 1, on_busy, 3, None).to_json()
        words = {"world_size": self.size, "pid": 1, "training": {"torch": "none"}, "ledger": {}}
        far = {"token": "t", "addresses": ["a"], "port": 1} if self.hosts_count > 1 else {}
        for host in self.hosts:
            host.keeper.begin({**settings, **words, **far, "hosts": arranged.to_json(), "host": host.number})
        for rank in self.ranks:
            rank.say({"kind": "ckpt.hello", "rank": rank.rank, "pid": 1000 + rank.rank})

    @property
    def keeper(self):
        return self.hosts[0].keeper

    def durable(self, step):
        """A rank was told that this is durable."""
        self.reported = max(step, self.reported)

    # one thing after another

    def moves(self):
        """All that may happen next."""
        ranks = [rank for rank in self.ranks if rank.alive]
        hosts = [host for host in self.hosts if host.alive]
        lines = [line for host in hosts for line in (host.line, host.leads) if line is not None]
        return [
            *(rank.tell for rank in ranks if rank.up),
            *(functools.partial(Rank.hear_next, rank) for rank in ranks if rank.down),
            *(line.deliver for line in lines if line.open and line.queue and line.on_message is not None),
            *(one.work for host in hosts for one in host.hands.helpers if one.said or one.scribe is not None),
            *(functools.partial(host.loop.fire, timer) for host in hosts for timer in host.loop.due()[:1]),
        ]

    def turn(self):
        """One thing happens; False where nothing can."""
        moves = self.moves()
        self.random.shuffle(moves)
        return any(move() is not False for move in moves[:6]) or any(move() is not False for move in moves[6:])

    def run(self, until=lambda: False, turns=TURNS):
        """Turn until something is so, or nothing is to be done now."""
        for _ in range(turns):
            if until() or not self.turn():
                return
        raise AssertionError("it does not come to rest")

    def rest(self, until, limit_s=20.0):
        """Turn, and let time pass where nothing is to be done, until something is so: nobody waits for who is gone."""
        end = self.clock.now() + limit_s
        while not until():
            self.run(until)
            if not until():
                timers = [t.when for h in self.hosts if h.alive and h.loop.running for t in h.loop.timers]
                assert timers, "nothing will ever happen"
                self.clock.now_s = max(self.clock.now(), min(timers))
                assert self.clock.now() < end, "it takes too long"

    def start(self, step=None):
        """All make their Checkpointers, and restore; return what each has begun from."""
        self.rest(lambda: all(rank.phase != "joining" for rank in self.ranks))
        assert {rank.phase for rank in self.ranks} == {"welcome"}, self.ranks[0].refused
        return self.restore(step)

    def restore(self, step=None):
        """All restore; return what each goes on from."""
        for rank in self.ranks:
            rank.ask_to_restore(step)
        self.rest(lambda: all(rank.phase != "asks" for rank in self.ranks))
        assert {rank.phase for rank in self.ranks} == {"runs"}, self.ranks[0].refused
        return [rank.restored for rank in self.ranks]

    def living(self, *phases):
        return [rank for rank in self.ranks if rank.alive and (not phases or rank.phase in phases)]

    # deaths

    def lose(self, number):
        """A host dies with all that lives there; of what it had said a part is heard."""
        host = self.hosts[number]
        for rank in self.ranks:
            if rank.host is host:
                rank.die(told=False)
        self.lose_keeper(number)

    def lose_keeper(self, number):
        """A keeper dies with its helpers; of what it had said to the others a part is heard."""
        host = self.hosts[number]
        host.alive = host.loop.running = False
        host.hands.close()
        for other in self.hosts[1:] if number == 0 else [host]:
            heard = other.line if number == 0 else other.leads
            if heard is None or not heard.open or heard.on_message is None:
                continue
            for _ in range(self.random.randint(0, len(heard.queue))):
                heard.deliver()
            end = heard.on_end
            heard.drop()
            (other.line if number else other.leads).drop()
            end("it has ended")
        for rank in self.ranks:
            if rank.host is host:
                rank.up.clear()

    def close(self):
        for rank in self.ranks:
            if rank.alive:
                rank.die(told=False)
        for host in self.hosts:
            host.close()
