"""Simulated agents over a real store: `python -m everstep.experiments.bench.agents` holds some of them, a thread each.

An agent stands for one node. It waits for the fault's fact, says that its ranks have arrived, and reads the next
roster, by the rules of `bench.board`, each over a guarded connection of its own as in the product. The ranks are names:
no process trains, and leaving a function takes no time. The agent of node 0 sets the fact, and so is the one that
plans: it gathers the arrivals, runs the product's machine, and puts the next roster in the place of the last. Nobody
stands in for it here.

What a real node does for itself (parse the roster, step its machine) is done by the planner alone and timed apart:
hundreds of nodes would otherwise queue for this machine's few cores.

    stdin   {"size": …} begins a world, {"go": number} a round of it; the end ends the process
    stdout  {"ready": …} when the agents of a world are connected, then for each round their latest times
"""

import datetime
import gc
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore

from everstep.clock import SYSTEM
from everstep.experiments.bench import board
from everstep.experiments.core import simulated, wire
from everstep.process.kernel import raise_files_limit
from everstep.recovery.core.words import Facts, Incarnation
from everstep.store.connection import Connection
from everstep.store.tcp import TcpStore

STACK, EPOCH = 1 << 19, 0
SWITCH_S = 0.5
"""Before a thread asks another for the interpreter: a hundred that do so every 5 ms, as is usual, keep a core busy.
They stand for machines of their own, and each lets go of it at its next call anyway. NVRx's clients have the same."""


@dataclass
class Times:
    """The latest of these agents in one round; seconds of the machine's monotonic clock."""

    told: float = 0.0
    arrived: float = 0.0
    read: float = 0.0
    more: dict[str, float] = field(default_factory=dict[str, float])  # what the planner knows


@dataclass(frozen=True, slots=True)
class Size:
    """A world, and which of its nodes are held here: from `first`, `last` not included."""

    host: str
    port: int
    first: int
    last: int
    ranks: int
    per_node: int
    rounds: int
    arrivals: str  # a key for each `rank`, or for each `node`
    limit: float


class Rounds:
    """Where the agents of this process meet: the last one to connect, and the last one of each round, say so."""

    def __init__(self, agents: int, rounds: int) -> None:
        self._lock, self._agents, self._here = threading.Lock(), agents, 0
        self._times: dict[int, tuple[int, Times]] = {}
        self.begin = [threading.Event() for _ in range(rounds)]  # the planner waits for them

    def connected(self) -> None:
        """Count an agent."""
        with self._lock:
            self._here += 1
            if self._here == self._agents:
                say({"ready": self._here})

    def done(self, number: int, told: float, arrived: float, read: float, more: dict[str, float]) -> None:
        """Note an agent's round; print the round when it was the last."""
        with self._lock:
            count, times = self._times.get(number, (0, Times()))
            times.told, times.arrived, times.read = (
                max(times.told, told), max(times.arrived, arrived), max(times.read, read),
            )  # fmt: skip
            times.more |= more
            self._times[number] = (count + 1, times)
            if count + 1 == self._agents:
                said = {"round": number, "told": times.told, "arrived": times.arrived, "read": times.read}
                say(said | times.more)


def say(message: dict[str, Any]) -> None:
    """Print one line for the driver."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Agent:
    """One node."""

    def __init__(self, size: Size, node: int, rounds: Rounds, known: bytes) -> None:
        self._size, self._node, self._rounds, self._known = size, node, rounds, known
        self._store: TcpStore
        count = min(size.per_node, size.ranks - node * size.per_node)
        self._lives = [0] * count

    def run(self) -> None:
        """Connect, and live through all rounds."""
        self._store = connected(self._size)
        self._rounds.connected()
        try:
            for number in range(self._size.rounds):
                self._round(number)
        finally:
            self._store.close()

    def _round(self, number: int) -> None:
        limit = self._size.limit
        self._begin(number)
        fault = board.run(self._store, board.heard(EPOCH, board.fault(EPOCH, number), self._known), limit)
        self._must(fault is not None, "fault")
        told = SYSTEM.now()
        self._arrive(number)
        arrived = SYSTEM.now()
        more = self._plan(number)
        self._known = board.run(self._store, board.following(EPOCH, number + 1, self._known), limit)
        read = SYSTEM.now()
        self._rounds.done(number, told, arrived, read, more | {"bytes": float(len(self._known))} if more else {})

    def _must(self, came: bool, what: str) -> None:
        if not came:
            raise TimeoutError(f"node {self._node}: no {what} within {self._size.limit:g} s")

    def _begin(self, number: int) -> None:
        """Nothing, but for the planner."""

    def _plan(self, number: int) -> dict[str, float]:
        """Nothing, but for the planner."""
        return {}

    def _mine(self) -> Iterator[tuple[Incarnation, Facts]]:
        for slot, life in enumerate(self._lives):
            yield simulated.incarnation(self._node, slot, life), simulated.facts(self._node, slot)

    def _arrive(self, number: int) -> None:
        """Say that this node's ranks have left the old generation: a key each, or one for all of them."""
        here = [(who, brought) for who, brought in self._mine() if not self._dead(who)]
        if self._size.arrivals == "node":
            self._store.create(board.arrived(EPOCH, number + 1, self._node), _facts(here))
            return
        for who, brought in here:
            self._store.create(board.arrived(EPOCH, number + 1, who), _facts([(who, brought)]))

    def _dead(self, who: Incarnation) -> bool:
        del who
        return False


def connected(size: Size) -> TcpStore:
    """Return a guarded connection. Not by `TcpStore.open`, which opens one at a time: each costs a name's look-up."""
    client = TCPStore(
        size.host, size.port, None, False, wait_for_workers=False, timeout=datetime.timedelta(seconds=size.limit)
    )
    return TcpStore(Connection(size.host, size.port, client), timeout_s=size.limit)


class Planner(Agent):
    """The agent of node 0: one of its ranks dies in every round."""

    def __init__(self, size: Size, rounds: Rounds, known: bytes) -> None:
        super().__init__(size, 0, rounds, known)
        self._roster = wire.unpack(known)
        self._view = simulated.running(self._roster)
        self._set = 0.0

    @property
    def _victim(self) -> tuple[Incarnation, Incarnation]:
        """Who dies, and who stands ready."""
        slot = len(self._lives) - 1
        life = self._lives[slot]
        return simulated.incarnation(0, slot, life), simulated.incarnation(0, slot, life + 1)

    def _dead(self, who: Incarnation) -> bool:
        return who == self._victim[0]

    def _begin(self, number: int) -> None:
        """Set the fact when the driver says so. The clock of the round begins before the call."""
        if number == 0:
            self._store.create(board.newest(EPOCH), self._known)
        self._rounds.begin[number].wait(self._size.limit)
        dead, standby = self._victim
        body = {"kind": "death", "incarnation": str(dead), "standby": [str(standby)], "generation": number}
        self._set = SYSTEM.now()
        self._store.create(board.fault(EPOCH, number), json.dumps(body).encode())

    def _plan(self, number: int) -> dict[str, float]:
        dead, standby = self._victim
        view = simulated.struck(self._view, dead, standby)
        arrivals = [here for here in self._gather(number, dead) if here]
        collected = SYSTEM.now()
        view, roster = simulated.gathered(view, arrivals)
        value = wire.pack(roster)
        decided = SYSTEM.now()
        won = board.run(self._store, board.propose(EPOCH, number + 1, self._known, value))
        self._must(won == value, "roster of its own standing")
        published = SYSTEM.now()
        before = self._view
        self._view, self._roster = simulated.entered(view, wire.unpack(value)), roster
        self._lives[-1] += 1
        more = {"set": self._set, "collected": collected, "decided": decided, "published": published}
        return more | {"agent": self._own(before, dead, standby, value)}

    def _own(self, before: Any, dead: Incarnation, standby: Incarnation, value: bytes) -> float:
        """Time what each node does for itself: parse the roster and step its machine."""
        view = simulated.struck(before, dead, standby)
        began = SYSTEM.now()
        simulated.entered(view, wire.unpack(value))
        return SYSTEM.now() - began

    def _gather(self, number: int, dead: Incarnation) -> Iterator[list[tuple[Incarnation, Facts]]]:
        """Read every arrival when all have come: what stands under one key, together."""
        places: Iterable[object] = (
            [m.incarnation for m in self._roster.members if m.incarnation != dead]
            if self._size.arrivals == "rank"
            else range(-(-self._size.ranks // self._size.per_node))
        )
        names = [board.arrived(EPOCH, number + 1, who) for who in places]
        values = self._store.gather(names, timeout_s=self._size.limit)
        self._must(values is not None, "arrivals")
        for told in map(json.loads, values or ()):
            yield [(Incarnation.parse(text), Facts(node, slot, False)) for text, node, slot in told]


def _facts(who: list[tuple[Incarnation, Facts]]) -> bytes:
    return json.dumps([[str(i), brought.node, brought.slot] for i, brought in who]).encode()


def main() -> None:
    """Hold agents, of one world after another, until stdin ends."""
    raise_files_limit()
    threading.stack_size(STACK)
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # a real agent imports no torch: what it made is not walked over in the midst of a round
    rounds = Rounds(0, 0)
    for line in sys.stdin:
        message = json.loads(line)
        if "go" in message:
            rounds.begin[message["go"]].set()
            continue
        size = Size(**message["size"])
        rounds = Rounds(size.last - size.first, size.rounds)
        known = wire.pack(simulated.first_roster(size.ranks, size.per_node))
        for node in range(size.first, size.last):
            agent = Planner(size, rounds, known) if node == 0 else Agent(size, node, rounds, known)
            threading.Thread(target=agent.run, daemon=True).start()


if __name__ == "__main__":
    main()
