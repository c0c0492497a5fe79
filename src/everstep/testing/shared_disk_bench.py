"""The disk tier of several nodes in one process: a hub, nodes that die at any word, ranks and real writers.

Each node has its real companion, its ranks' real clients and writers with real files in one directory. Words travel
only when `deliver` says so: in order from one to another, in any order otherwise. `Hub` tells of nodes and rosters as
an agent's does: everybody hears that in one order.
"""

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.core.plan import Plan
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.holder import Hold, OwnHold
from everstep.checkpoint.intent_client import IntentClient
from everstep.checkpoint.shared_disk import SharedDisk
from everstep.clock import SYSTEM, Clock
from everstep.events import Event, TierEvent
from everstep.recovery.api import Child, Message
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.testing.disk_bench import BenchShelf, BenchWriter
from everstep.testing.disks import UnsyncedFiles

HUB = "hub"


class Node:
    """One node: its companion, its ranks and writers. Implements `recovery.api.NodeHost`."""

    def __init__(self, hub: "Hub", name: str, ordinal: int, directory: str, interval: int, keep: int | None) -> None:
        self.hub, self.node, self.run_dir = hub, name, f"bench of {name}"
        self.ordinal = ordinal
        self.clock: Clock = hub.clock
        self.events: list[Event] = []
        self.writers: list[BenchWriter] = []
        self.clients: dict[int, IntentClient] = {}
        self.shelf = BenchShelf(hub.world_size)
        self.disk = SharedDisk(directory, interval, self.shelf, keep, hold=hub.hold(directory), visible_s=hub.visible_s)
        self.disk.start(self)
        self.generation = -1
        self.older: dict[str, list[list[Any]]] = {}  # what each node has told, as the memory tier hears it

    @property
    def world_size(self) -> int:
        """See `Host.world_size`."""
        return self.hub.world_size

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        if rank in self.clients:
            self.clients[rank].on_message(message)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`."""
        files = self.hub.files(self.node)
        self.writers.append(BenchWriter(self, name, arguments["directory"], arguments["rank"], files))  # type: ignore[arg-type]
        return self.writers[-1]

    def emit(self, event: Event) -> None:
        """See `Host.emit`."""
        self.events.append(event)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""

    def recheck(self) -> None:
        """See `Host.recheck`."""

    def tell(self, node: str, message: Message) -> None:
        """See `NodeHost.tell`: JSON, as on a wire."""
        self.hub.post(self.node, node, json.dumps(message))

    def hear(self, sender: str, text: str) -> None:
        """Something arrives."""
        body = json.loads(text)
        if sender != HUB:
            self.disk.on_node_message(sender, body)
            return
        match body["is"]:
            case "nodes":
                self.disk.on_nodes(dict.fromkeys(body["nodes"], "127.0.0.1"))
            case "fault":
                self.disk.on_stopped(body["generation"])
                older = [[one.step, dict(one.where)] for one in self.disk.committed()]
                told = {"is": "told", "node": self.node, "words": self.disk.telling(), "older": older}
                self.hub.say({**told, "generation": body["generation"]})
            case "told":
                self.disk.told(body["node"], body["words"])
                self.older[body["node"]] = body["older"]
            case _:
                self._enter(Roster.from_json(body["roster"]))

    def _enter(self, roster: Roster) -> None:
        own = [m.rank for m in roster.members if m.node == self.node]
        self.shelf.plan = self.hub.plan(self, roster)
        for rank, buffer in list(self.shelf.buffers):
            newer = self.shelf.buffers[rank, buffer][1].step > max(0, self.shelf.plan.parent)
            if (rank not in own or newer) and (rank, buffer) not in self.shelf.held:
                self.shelf.drop(rank, buffer)
        self.clients = {rank: self._client(rank) for rank in own}
        self.generation = roster.generation
        self.disk.on_roster(roster)

    def _client(self, rank: int) -> IntentClient:
        began = max(0, self.shelf.plan.parent) if self.shelf.plan else 0
        return IntentClient(lambda message: self.disk.on_message(rank, message, ()), began)

    def end_step(self, rank: int, step: int) -> None:
        """A rank of this node ends a step."""
        due = self.clients[rank].due(step)
        buffer = self.shelf.take(rank, step, self.generation)
        if due:
            self.shelf.hold(rank, buffer)
            self.clients[rank].staged(buffer, lambda: step)

    def close(self) -> None:
        """The node is gone, or the job over."""
        self.disk.close()
        for writer in self.writers:
            writer.close()
        self.writers.clear()
        self.shelf.close()


class Hub:
    """All nodes of a job, and what travels between them. `rng` decides what arrives next."""

    def __init__(
        self,
        directory: str,
        nodes: int,
        rng: random.Random,
        *,
        ranks_each: int = 1,
        interval: int = 5,
        keep: int | None = 2,
        visible_s: float = 0.0,
        clock: Clock = SYSTEM,
        files: Callable[[str], FileOps] = lambda node: UnsyncedFiles(),
        hold: Callable[[str], Hold] = lambda directory: OwnHold(directory, several=True),
    ) -> None:
        self.rng, self.clock, self.files, self.visible_s, self.hold = rng, clock, files, visible_s, hold
        self.world_size = nodes * ranks_each
        self.queues: dict[tuple[str, str], deque[str]] = {}
        self.delivered = 0
        self.generation = -1
        self.events: list[Event] = []
        self.plans: dict[int, tuple[int, str | None]] = {}
        self._waits: set[str] | None = None  # who has not told what it keeps
        names = [f"node-{number}" for number in range(nodes)]
        self.nodes = {name: Node(self, name, n, directory, interval, keep) for n, name in enumerate(names)}
        self.homes = {rank: names[rank // ranks_each] for rank in range(self.world_size)}
        for node in self.nodes.values():
            node.disk.on_nodes(dict.fromkeys(names, "127.0.0.1"))
        self._fault()

    # words

    def post(self, sender: str, receiver: str, text: str) -> None:
        """Put something on its way."""
        if receiver in self.nodes:
            self.queues.setdefault((sender, receiver), deque()).append(text)

    def say(self, fact: Mapping[str, Any]) -> None:
        """All hear it, in the order in which it is said here."""
        if fact["is"] == "told" and fact["generation"] == self.generation - 1:
            assert self._waits is not None, "told twice"
            self._waits.discard(fact["node"])
        for name in self.nodes:
            self.post(HUB, name, json.dumps(fact))
        self._publish()

    def _publish(self) -> None:
        if self._waits is not None and not self._waits & set(self.nodes):
            self._waits = None
            members = tuple(
                Member(rank, Incarnation("bench", 100 + rank, 1 + self.generation), home, rank, False, "kept")
                for rank, home in self.homes.items()
            )
            self.say({"is": "roster", "roster": Roster(0, self.generation, members).to_json()})

    def deliver(self) -> bool:
        """Let one word arrive, or one writer do one thing; False where nothing is left."""
        ready = [key for key, queue in self.queues.items() if queue and key[1] in self.nodes]
        writers = [writer for node in self.nodes.values() for writer in node.writers]
        self.rng.shuffle(writers)
        words_first = not writers or self.rng.random() < 0.7  # noqa: PLR2004 - more words than work
        if ready and words_first:
            self._arrive(*self.rng.choice(ready))
            return True
        if any(writer.work() for writer in writers):
            return True
        if ready:
            self._arrive(*self.rng.choice(ready))
        return bool(ready)

    def _arrive(self, sender: str, receiver: str) -> None:
        text = self.queues[sender, receiver].popleft()
        self.delivered += 1
        self.nodes[receiver].hear(sender, text)

    def settle(self) -> None:
        """Until nothing moves."""
        for _ in range(20_000):
            if not self.deliver():
                return
        raise AssertionError("it never comes to rest")

    # the world

    def plan(self, node: Node, roster: Roster) -> Plan:
        """From what a generation begins: the word of rank 0's node; all must come to the same."""
        told = node.older.get(roster.members[0].node, [])
        step = max((int(one[0]) for one in told), default=None)
        plan = Plan(step, "disk" if told else None, "the bench's")
        known = self.plans.setdefault(roster.generation, (plan.parent, plan.tier))
        assert known == (plan.parent, plan.tier), f"{node.node} would begin from {plan.parent}, others from {known}"
        return plan

    @property
    def began(self) -> int:
        """The step after which the present generation began."""
        return max(0, self.plans[self.generation][0])

    def step(self, step: int) -> None:
        """Every rank ends `step`."""
        for rank in self.rng.sample(range(self.world_size), self.world_size):
            node = self.nodes[self.homes[rank]]
            if node.generation == self.generation:
                node.end_step(rank, step)

    def kill(self, name: str, *, in_flight: bool) -> None:
        """A node is gone, and what it said with it, or not yet; others take its ranks."""
        gone = self.nodes.pop(name)
        self.events += gone.events
        gone.close()
        for key in [key for key in self.queues if key[1] == name or (key[0] == name and not in_flight)]:
            del self.queues[key]
        left = list(self.nodes)
        self.homes = {rank: home if home in self.nodes else left[rank % len(left)] for rank, home in self.homes.items()}
        self.say({"is": "nodes", "nodes": left})
        self._fault()

    def _fault(self) -> None:
        self.generation += 1
        self._waits = set(self.nodes)
        self.say({"is": "fault", "generation": self.generation - 1})

    def tiers(self, what: str) -> list[int]:
        """Steps of all tier events of that kind, of all nodes that are or were here."""
        events = [*self.events, *(event for node in self.nodes.values() for event in node.events)]
        return [event.step for event in events if isinstance(event, TierEvent) and event.what == what]

    def close(self) -> None:
        """The job is over."""
        for node in self.nodes.values():
            node.close()
