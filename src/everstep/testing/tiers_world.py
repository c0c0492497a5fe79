"""A job of several nodes with all its tiers, that never ran: memory, copies on other nodes, a shared directory.

The parts of `peer_world`, and beside them each node's real disk tier with real files. What agents hear of nodes, of
what others keep and of rosters comes to all in one order, as from their hub; all else in any order. Nodes, workers,
porters and writers die at any instant, and the whole job: `next_run` begins another on the same directory.

The laws, looked at whenever a roster is made and whenever all have begun: the plan takes the newest step of which every
rank has a whole copy in some memory, or which some node that is here knows to be on disk; all ranks begin from that
step, of one generation, with the bytes that were theirs; and it is never older than `floor`, what may not be lost.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.copies import Copy
from everstep.checkpoint.core.plan import MEMORY
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.holder import OwnHold
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.node_shelf import NodeShelf
from everstep.checkpoint.peer import COPY_BUFFERS, Peer
from everstep.checkpoint.shared_disk import SharedDisk
from everstep.checkpoint.shares import shares
from everstep.errors import EverstepError
from everstep.recovery.api import Child, Message
from everstep.testing.disk_bench import BenchWriter
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.nodes import SimNode, roster
from everstep.testing.peer_parts import Broken, SimWorker
from everstep.testing.peer_world import Job
from everstep.testing.states import rank_state

MOVED = 0.3
"""The share of lost ranks that go to another node."""
WORK = 0.15
"""The share of what happens that writers do."""
Line = tuple[int, int, int]
"""Run, step and generation of a state."""


@functools.lru_cache(maxsize=4096)
def _state(rank: int, ranks: int, step: int, line: str) -> tuple[bytes, bytes]:
    made = rank_state(rank, ranks, step, line=line)
    return made.payload, made.layout.to_json()


@dataclass
class _Bench:
    """What writers ask of their node."""

    disk: SharedDisk
    writers: list[BenchWriter] = field(default_factory=list[BenchWriter])


class TierJob(Job):
    """Nodes, ranks and tiers, and what has become of them."""

    def __init__(
        self,
        seed: int,
        directory: str,
        nodes: int = 2,
        per_node: int = 2,
        *,
        every: int = 5,
        keep: int = 2,
        all_hear: bool = True,
        before: "TierJob | None" = None,
        **settings: Any,
    ) -> None:
        """`every`: interval of the disk; `before`: the run before this one. `settings`: of the peer tier.

        `all_hear`: agents see to it that all hear what memory holds, before a roster; else one decides, and tells.
        """
        self._directory, self._every, self._keep = directory, every, keep
        self.run_number: int = 0 if before is None else before.run_number + 1
        self.sound: bool = before is None or before.sound  # nothing was damaged behind anybody's back
        self._inherited = before.durable_step if before is not None else -1
        self.floor = self._inherited  # what may not be lost
        self.expected: tuple[int, str | None] = (-1, None)  # step and tier of what the present generation begins from
        self.made: dict[tuple[int, bytes], Line] = {} if before is None else before.made
        self._benches: dict[str, _Bench] = {}
        self._present: dict[str, list[str]] = {}  # who is here, as each node has heard
        self._entered: dict[str, int] = {}  # the generation of each node
        self._waits: set[str] | None = None  # who has not told what it keeps
        self._told: dict[str, Mapping[str, Any]] = {}
        self._lines: list[tuple[int, int]] = []  # generations so far, and the steps that they began from
        self._looked = -1  # at the beginning of this generation
        self._spent = -1  # the save of the peer tier that counted when all had begun after a node went
        self._went = False  # a node, since all had begun
        super().__init__(seed, nodes, per_node, all_hear=all_hear, **settings)
        self._present = {node.name: list(self.nodes) for node in self.alive}

    def _equip(self, node: SimNode, look: Callable[[], Memory], settings: Mapping[str, Any]) -> None:
        self.size = segment.needed_bytes(*map(len, self.state(0, 1, 0))) + 64
        shelf = NodeShelf(readers=1, for_copies=COPY_BUFFERS, look=look)
        for_disk, for_copies = shares(shelf, 2)
        hold = OwnHold(self._directory, several=True)
        disk = SharedDisk(self._directory, self._every, for_disk, self._keep, hold=hold, visible_s=0.0)
        shelf.older = disk.committed
        self._benches[node.name] = _Bench(disk)
        node.run_dir = f"run {self.run_number} of {node.name}"
        node.ride(shelf)
        node.ride(Peer(shelf, for_copies, look=look, **settings))
        node.ride(disk)

    def _spawn(self, node: SimNode, name: str, arguments: Mapping[str, Any]) -> Child:
        if "directory" not in arguments:
            return super()._spawn(node, name, arguments)
        bench = self._benches[node.name]
        files = UnsyncedFiles()
        bench.writers.append(BenchWriter(bench, name, arguments["directory"], arguments["rank"], files))  # type: ignore[arg-type]
        return bench.writers[-1]

    # states

    def state(self, rank: int, step: int, generation: int) -> tuple[bytes, bytes]:
        """See `peer_parts.World.state`: no two runs or generations make the same."""
        payload, meta = _state(rank, self.ranks, step, f" {self.run_number}.{generation}")
        self.made[rank, payload] = self.run_number, step, generation
        return payload, meta

    def durable(self, rank: int, source: Message) -> tuple[int, int] | str:
        """See `peer_parts.World.durable`: read, and held against what was ever saved."""
        try:
            with open_checkpoint(source["path"], rank, self.ranks) as found:
                payload = bytes(found.payload())
        except EverstepError as error:
            return str(error)
        line = self.made.get((rank, payload))
        if line is None or line[1] != source["step"]:
            raise Broken(f"rank {rank} read from {source['path']} what nobody has ever saved, or {line}")
        return line[1], -10 - 1000 * line[0] - line[2]  # unlike any generation of this run

    @property
    def durable_step(self) -> int:
        """The newest step that was ever told to be durable."""
        told = [step for node in self.nodes.values() for step in node.tiers("committed", "disk")]
        return max([self._inherited, *told])

    # the hub

    def _say(self, heard: Callable[[SimNode], None]) -> None:
        """All hear it, in the order in which it is said here."""
        for node in self.alive:
            self.net.put(("hub", node.name, "hub"), functools.partial(heard, node))

    def fault(self) -> None:
        """The generation has ended: nodes stop their ranks, and tell what they keep. Once for a generation."""
        if self._waits is not None:
            return
        if self.all_begun:
            self.floor = min(worker.step for worker in self.workers.values())
        self.generation += 1
        self._waits, self._told = {node.name for node in self.alive}, {}
        self._say(functools.partial(self._leave, self.generation))

    def _leave(self, generation: int, node: SimNode) -> None:
        for rank, worker in list(self.workers.items()):
            if worker.node is not node:
                continue
            worker.told, worker.began, worker.failed = None, None, ""
            if rank in self._dead:
                worker.close()
                del self.workers[rank]
                self._dead.discard(rank)
        words = {prefix: one.telling() for prefix, one in node.companions.items() if hasattr(one, "telling")}
        if generation == self.generation and self._waits is not None:
            text = json.dumps(words)
            self._told[node.name] = json.loads(text)
            self._waits.discard(node.name)
            self._say(functools.partial(self._hear_told, node.name, text))
            self._publish()

    def _hear_told(self, name: str, text: str, node: SimNode) -> None:
        if name in self._present[node.name]:
            for prefix, words in json.loads(text).items():
                if self._all_hear or prefix != "snapshot":
                    node.companions[prefix].told(name, words)

    def _hear_nodes(self, names: list[str], node: SimNode) -> None:
        self._present[node.name] = names
        node.nodes(names)

    def _publish(self) -> None:
        here = [node.name for node in self.alive]
        if self._waits is None or self._waits & set(here):
            return
        self._waits = None
        for rank, home in self.homes.items():
            if home not in here or (rank not in self.workers and self.draw.random() < MOVED):
                self.homes[rank] = self.draw.choice(here)
        told = {name: words for name, words in self._told.items() if name in here}
        self._examine(told)
        self.expected = self._newest(told)
        self._lines.append((self.generation, self.expected[0]))
        self._say(functools.partial(self._enter_roster, self.generation, dict(self.homes)))

    def _enter_roster(self, generation: int, homes: Mapping[int, str], node: SimNode) -> None:
        def told(rank: int, message: Mapping[str, Message]) -> None:
            if rank not in self.workers:
                self.workers[rank] = SimWorker(self, rank, node)
            self.workers[rank].assigned(message)

        if node.name in self._entered:
            node.stop(self._entered[node.name])
        node.enter(roster(generation, homes), told)
        self._entered[node.name] = generation
        if self._all_hear:
            self._look_at_plan(node, generation)

    def _look_at_plan(self, node: SimNode, generation: int) -> None:
        plan = node.companions["snapshot"].plan
        suspected = "is suspected" in plan.reason  # then an older one is taken on purpose
        if suspected:
            self.floor, self._spent = -1, self.counted()
        if suspected or (not self._all_hear and plan.parent > self.expected[0]):  # decided later, it may know more
            self.expected = plan.parent, plan.tier
            self._lines = [(g, plan.parent if g == generation else step) for g, step in self._lines]
        began = dict(self._lines)[generation]
        if plan.parent != began:
            raise Broken(f"{node.name} would begin generation {generation} from {plan.parent}, not {began}: {plan}")

    # what must be so

    def _newest(self, told: Mapping[str, Mapping[str, Any]]) -> tuple[int, str | None]:
        """Return the newest step of which every rank has a whole copy, or that is on disk; -1: the beginning."""
        struck = {tuple(place) for words in told.values() for place in words["snapshot"]["struck"]}
        ranks: dict[tuple[int, int], set[int]] = {}
        for name, words in told.items():
            for row in words["snapshot"]["copies"]:
                copy = Copy.from_row(name, row)
                if tuple(copy.place) not in struck and self._lives(copy):
                    ranks.setdefault((copy.snapshot.step, copy.snapshot.generation), set()).add(copy.snapshot.rank)
        whole = [step for (step, _), held in ranks.items() if len(held) == self.ranks]
        gone = {step for words in told.values() for _, step in words["snapshot"]["struck_older"]}
        disk = [step for words in told.values() for step, *_ in words["snapshot"]["older"] if step not in gone]
        best, durable = max(whole, default=-1), max(disk, default=-1)
        if best >= max(0, durable):
            return best, MEMORY
        return durable, "disk" if disk else None

    def _lives(self, copy: Copy) -> bool:
        made_by = copy.snapshot.generation
        return all(copy.snapshot.step <= step for generation, step in self._lines if generation > made_by)

    def _examine(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """What is told to be whole is whole, and what it should be, unless a byte was changed."""
        if not self.sound or not self._all_hear:  # else a plan that comes late makes void what was told
            return
        for name, words in told.items():
            for row in words["snapshot"]["copies"]:
                copy = Copy.from_row(name, row)
                shelf, peer = (self.nodes[name].companions[prefix] for prefix in ("snapshot", "peer"))
                place = copy.place
                fd = peer.kept.find(place).fd if copy.replica else shelf.fd(place.rank, place.number)
                held = os.pread(fd, os.fstat(fd).st_size, 0)
                header = segment.parse(held)
                if not isinstance(header, Header) or segment.wound(held, header):
                    raise Broken(f"{place} is told, and is not whole: {header}")
                state = self.state(header.rank, header.step, header.generation)[0]
                if held[header.payload_offset :][: header.payload_bytes] != state:
                    raise Broken(f"{place} is told, and holds something else")

    @property
    def all_begun(self) -> bool:
        """True when every rank has what it begins from, in the present generation."""
        here = all(self._entered.get(node.name) == self.generation for node in self.alive)
        return self._waits is None and here and super().all_begun

    def _look(self) -> None:
        """All have begun: from what they should?"""
        self._looked = self.generation
        for node in self.alive if not self._all_hear else ():
            if node.companions["snapshot"].plan is not None:
                self._look_at_plan(node, self.generation)
        began = {worker.began for worker in self.workers.values()}
        if len(began) != 1:
            raise Broken(f"ranks begin from different states: {began}")
        (one,) = began
        assert one is not None, "all have begun"
        if self._went:
            self._spent, self._went = self.counted(), False
        self.begun.append(one)
        if one[0] != max(0, self.expected[0]):
            raise Broken(f"generation {self.generation} began from {one}, and should from {self.expected}")
        if self.sound and one[0] < self.floor:
            raise Broken(f"generation {self.generation} began from {one}: more is lost than may be, {self.floor}")

    # what happens

    def turn(self, *, steps: bool = True) -> None:
        """Chance lets one thing happen."""
        if self._looked < self.generation and self.all_begun:
            self._look()
        if self.failed and self._waits is None:
            self._heard_out()
            self.fault()
            return
        writers = [writer for node in self.alive for writer in self._benches[node.name].writers]
        if writers and self.draw.random() < WORK:
            self.draw.choice(writers).work()
            return
        super().turn(steps=steps)

    def begin(self, turns: int = 8000) -> None:
        """Go on until every rank has begun."""
        if self.generation < 0:
            self.fault()
        for _ in range(turns):
            if self._looked == self.generation and self.all_begun:
                return
            self.turn(steps=False)
        raise Broken(f"generation {self.generation} does not begin: {self.failed or 'nothing more happens'}")

    def kill_worker(self, rank: int) -> None:
        """A process dies."""
        super().kill_worker(rank)
        self.fault()

    def kill_writer(self) -> None:
        """A writer dies."""
        writers = [writer for node in self.alive for writer in self._benches[node.name].writers]
        self.draw.choice(writers).kill()

    def kill_node(self, name: str) -> None:
        """A node goes, with all that it held; the others hear of it when they do."""
        known = self._gone(name)
        counted = self.counted()
        self.floor = max(known, counted if counted > self._spent else -1)
        self._spent, self._went = counted, True
        names = [node.name for node in self.alive]
        self._say(functools.partial(self._hear_nodes, names))
        if self._waits is None:
            self.fault()
        self._waits = self._waits and self._waits & set(names)
        self._publish()

    def _gone(self, name: str) -> int:
        """End a node; return the newest step that the others know to be durable."""
        node = self.nodes[name]
        for porter in self.porters:
            porter.alive = porter.alive and porter.node is not node
        for rank, worker in list(self.workers.items()):
            if worker.node is node:
                worker.close()
                del self.workers[rank]
                self._dead.discard(rank)
        node.close()
        self._close_writers(name)
        disks = [self._benches[other.name].disk.inventory for other in self.alive]
        return max((step for known in disks for step in known.complete - known.struck), default=-1)

    def _close_writers(self, name: str) -> None:
        for writer in self._benches[name].writers:
            writer.close()
        self._benches[name].writers.clear()

    def end(self) -> None:
        """The whole job dies."""
        for node in self.alive:
            self._gone(node.name)

    def close(self) -> None:
        """End everything; nothing of memory may be left."""
        super().close()
        for name in self._benches:
            self._close_writers(name)
