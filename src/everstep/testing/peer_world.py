"""A job of several nodes that never ran: real shelves and peer tiers, workers and porters played, the rest is chance.

Every rank keeps its snapshots in real buffers of its node's real shelf; what goes between nodes, ranks and porters
waits in a `Net` until chance delivers it. Steps are in common, as collectives make them: nobody ends step k + 2 before
everybody has ended k + 1. Nodes, workers and porters die whenever chance has it.

The laws: all ranks begin from one step of one generation, with the bytes that were theirs; whatever is left to deliver,
they begin (`begin` raises `Broken` else); what counted is not lost to one node; nothing of memory is left behind.
"""

import contextlib
import functools
import json
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.node_shelf import NodeShelf
from everstep.checkpoint.peer import COPY_BUFFERS, Peer
from everstep.checkpoint.shares import shares
from everstep.recovery.api import Child, Message
from everstep.testing.nodes import Net, SimNode, StillClock, roster
from everstep.testing.peer_parts import PAYLOAD, Broken, SimPorter, SimWorker, payload

PLENTY = Memory(1 << 40)
TICK_S = 0.3


class Job:
    """Nodes, ranks, and what has become of them."""

    def __init__(
        self,
        seed: int,
        nodes: int = 2,
        per_node: int = 2,
        *,
        domains: Mapping[str, str] | None = None,
        losing: float = 0.0,
        look: Callable[[], Memory] = lambda: PLENTY,
        address: str = "",
        all_hear: bool = False,
        **settings: Any,
    ) -> None:
        """`settings`: of the peer tier. `losing`: the share of words between agents that are lost.

        `all_hear`: agents see to it that all hear what each keeps, before a roster.
        """
        self._all_hear = all_hear
        self.draw = random.Random(seed)
        self.net, self.clock = Net(), StillClock()
        self.size = segment.needed_bytes(PAYLOAD, 2)
        self.ranks = nodes * per_node
        self.nodes: dict[str, SimNode] = {}
        self.porters: list[SimPorter] = []
        self.workers: dict[int, SimWorker] = {}
        self.generation = -1
        self.homes = {rank: f"n{rank // per_node}" for rank in range(self.ranks)}
        self._fds: list[int] = []
        self._entering: list[str] = []
        self._dead: set[int] = set()
        self.begun: list[tuple[int, int]] = []
        for n in range(nodes):
            node = SimNode(f"n{n}", self.net, self.clock, self.nodes, self._spawn)
            node.losing, node.address = (losing, self.draw), address
            domain = (domains or {}).get(node.name, "")
            self._equip(node, look, {**settings, "domain": domain})
        for node in self.alive:
            node.nodes([other.name for other in self.alive])

    def _equip(self, node: SimNode, look: Callable[[], Memory], settings: Mapping[str, Any]) -> None:
        """Have a node's companions ride on its agent."""
        shelf = NodeShelf(for_copies=COPY_BUFFERS, look=look)
        (share,) = shares(shelf, 1)
        node.ride(shelf)
        node.ride(Peer(shelf, share, look=look, **settings))

    def state(self, rank: int, step: int, generation: int) -> tuple[bytes, bytes]:
        """See `peer_parts.World.state`: nothing but bytes."""
        return payload(rank, step, generation), b"{}"

    def durable(self, rank: int, source: Message) -> tuple[int, int] | str:
        """See `peer_parts.World.durable`: there is no disk here."""
        raise Broken(f"rank {rank} is to begin from {source}")

    @property
    def alive(self) -> list[SimNode]:
        """The nodes that are here."""
        return [node for node in self.nodes.values() if node.alive]

    def dup(self, fd: int) -> int:
        """Duplicate a descriptor for somebody who is played."""
        self._fds.append(os.dup(fd))
        return self._fds[-1]

    def _spawn(self, node: SimNode, name: str, arguments: Mapping[str, Any]) -> Child:
        del name, arguments
        porter = SimPorter(self, node, len(self.porters))
        self.porters.append(porter)
        porter.say({"kind": "door", "port": porter.number + 1})
        return porter

    def porter_at(self, host: str, port: int) -> SimPorter | None:
        """Return whoever listens there."""
        found = self.porters[port - 1] if 0 < port <= len(self.porters) else None
        return found if found is not None and f"address-of-{found.node.name}" == host else None

    # generations

    def enter(self) -> None:
        """All ranks have left the last generation: begin the next, which agents learn of one after the other."""
        here = [node.name for node in self.alive]
        for rank, home in self.homes.items():
            if home not in here:
                self.homes[rank] = self.draw.choice(here)
        for rank, worker in list(self.workers.items()):
            if rank in self._dead or worker.node.name != self.homes[rank]:
                worker.close()
                del self.workers[rank]
        self._dead.clear()
        self.generation += 1
        for worker in self.workers.values():
            worker.told, worker.began, worker.failed = None, None, ""
        if self._all_hear and self.generation:
            self._tell_all()
        self._entering = self.draw.sample(here, len(here))

    def _tell_all(self) -> None:
        shelves = {node.name: node.companions["snapshot"] for node in self.alive}
        told = {name: json.dumps(shelf.telling()) for name, shelf in shelves.items()}
        for shelf in shelves.values():
            for name, text in told.items():
                shelf.told(name, json.loads(text))

    def _enter_one(self) -> None:
        node = self.nodes[self._entering.pop()]
        if not node.alive:
            return

        def told(rank: int, message: Mapping[str, Message]) -> None:
            if rank not in self.workers:
                self.workers[rank] = SimWorker(self, rank, node)
            self.workers[rank].assigned(message)

        if self.generation:
            node.stop(self.generation - 1)
        node.enter(roster(self.generation, self.homes), told)

    @property
    def all_begun(self) -> bool:
        """True when every rank has what it begins from."""
        return len(self.workers) == self.ranks and all(w.began is not None for w in self.workers.values())

    @property
    def failed(self) -> str:
        """Why a rank could not begin, where one could not."""
        return next((w.failed for w in self.workers.values() if w.failed), "")

    def turn(self, *, steps: bool = True) -> None:
        """Chance lets one thing happen."""
        moves = [self._deliver] * min(8, 2 * len(self.net.open)) + [self._tick]
        if self._entering:
            moves += [self._enter_one] * 2
        if steps and self.all_begun:
            moves += [self._step] * 3
        self.draw.choice(moves)()

    def _deliver(self) -> None:
        self.net.deliver(self.draw.choice(self.net.open))

    def _tick(self) -> None:
        self.clock.now_s += TICK_S
        for node in self.alive:
            node.tick()

    def _step(self) -> None:
        slowest = min(worker.step for worker in self.workers.values())
        ready = [w for w in self.workers.values() if w.step == slowest]
        self.draw.choice(ready).end_step()

    def begin(self, turns: int = 4000) -> None:
        """Enter a generation, and go on until every rank has begun; another where a copy was found damaged."""
        for _ in range(8):
            self.enter()
            for _ in range(turns):
                if self.failed or (self.all_begun and not self._entering):
                    break
                self.turn(steps=False)
            if not self.failed:
                break
            self._heard_out()
        if not self.all_begun:
            raise Broken(f"generation {self.generation} does not begin: {self.failed or 'nothing more happens'}")
        began = {worker.began for worker in self.workers.values()}
        if len(began) != 1:
            raise Broken(f"ranks begin from different states: {began}")
        (one,) = began
        assert one is not None, "all have begun"
        self.begun.append(one)

    def _heard_out(self) -> None:
        """What a rank has said before it failed is heard before its failure."""
        for channel in [c for c in self.net.open if c[2] == "up" and c[0].startswith("rank")]:
            while channel in self.net.open:
                self.net.deliver(channel)

    def run(self, turns: int) -> None:
        """Let things happen."""
        for _ in range(turns):
            self.turn()

    def settle(self, turns: int = 2000) -> None:
        """Deliver all that is on its way; no steps."""
        for _ in range(turns):
            if not self.net.open:
                return
            self.turn(steps=False)

    def counted(self) -> int:
        """Return the newest step that was told as kept on other nodes."""
        return max((step for node in self.nodes.values() for step in node.tiers("committed")), default=-1)

    # faults

    def kill_worker(self, rank: int) -> None:
        """A process dies."""
        self._dead.add(rank)

    def kill_node(self, name: str) -> None:
        """A node goes, with all that it held; the others hear of it when they do."""
        node = self.nodes[name]
        for porter in self.porters:
            if porter.node is node:
                porter.alive = False
        for rank, worker in list(self.workers.items()):
            if worker.node is node:
                worker.close()
                del self.workers[rank]
        node.close()
        names = [other.name for other in self.alive]
        for other in self.alive:
            self.net.put(("launcher", other.name, "nodes"), functools.partial(other.nodes, names))

    def kill_porter(self, name: str) -> None:
        """A node's porter dies."""
        for porter in self.porters:
            if porter.node.name == name and porter.alive:
                porter.kill()

    def flip(self, name: str, *, counted: bool = False) -> bool:
        """A byte of a replica changes, of one that counts where that is asked for; False where there is none."""
        peer = self.nodes[name].companions["peer"]
        copies = [c for c in peer.kept.copies(self.clock.now()) if not counted or c.version == peer.counted]
        if not copies:
            return False
        found = peer.kept.find(self.draw.choice(copies).place)
        at = segment.HEADER_BYTES + self.draw.randrange(PAYLOAD)
        (old,) = os.pread(found.fd, 1, at)
        os.pwrite(found.fd, bytes([old ^ (1 << self.draw.randrange(8))]), at)
        return True

    def close(self) -> None:
        """End everything; nothing of memory may be left."""
        for worker in self.workers.values():
            worker.close()
        for node in self.alive:
            node.close()
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
