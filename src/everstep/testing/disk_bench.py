"""The disk tier on a bench: agent, ranks and writers in one process, each moved by hand.

The companion, the ranks' intent clients and the writers' scribes are the real ones, with real files; what is left out
is the processes, so that a test decides who does what when: `step` lets every rank end a step, `write` lets the
writers answer, `kill` takes one away. Snapshots are those of `states`; a held one that is overwritten fails the test.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.core.manifest import Manifest
from everstep.checkpoint.core.plan import Committed, Plan, Sealed, choose
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.intent_client import IntentClient
from everstep.checkpoint.scribe import Scribe
from everstep.clock import SYSTEM, Clock
from everstep.errors import EverstepError
from everstep.events import Event, Notice, TierEvent
from everstep.recovery.api import Child, Message
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.recovery.link import Link
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.states import rank_state, snapshot

BUFFERS = 4


def no_metadata(manifest: Manifest) -> bytes:
    """Stands for DCP's metadata where no torch is wanted."""
    return str(manifest.step).encode()


@dataclass
class BenchShelf:
    """Holds the snapshots of all ranks; `source.Source`."""

    world_size: int
    plan: Plan | None = None
    held: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    buffers: dict[tuple[int, int], tuple[int, Sealed]] = field(
        default_factory=dict[tuple[int, int], tuple[int, Sealed]]
    )

    def fd(self, rank: int, buffer: int) -> int:
        """See `source.Source.fd`."""
        return self.buffers[rank, buffer][0]

    def hold(self, rank: int, buffer: int, offer: int = 0) -> None:
        """See `source.Source.hold`."""
        self.held.add((rank, buffer))

    def release(self, rank: int, buffer: int, offer: int = 0) -> None:
        """See `source.Source.release`: here the worker's hold and the tier's are one."""
        self.held.discard((rank, buffer))

    def sealed(self) -> Sequence[Sealed]:
        """See `source.Source.sealed`."""
        return [sealed for _, sealed in self.buffers.values()]

    def sealed_here(self) -> Sequence[Sealed]:
        """See `source.Source.sealed_here`."""
        return self.sealed()

    def take(self, rank: int, step: int, generation: int) -> int:
        """Snapshot a rank; return the buffer."""
        free = [b for b in range(BUFFERS) if (rank, b) not in self.held]
        buffer = min(free, key=lambda b: self.buffers[rank, b][1].step if (rank, b) in self.buffers else -1)
        self.drop(rank, buffer)
        parent = self.plan.parent if self.plan else -1
        fd = snapshot(rank_state(rank, self.world_size, step), step, generation=generation, sequence=step)
        self.buffers[rank, buffer] = fd, Sealed(rank, buffer, step, 0, generation, parent, self.world_size)
        return buffer

    def drop(self, rank: int, buffer: int) -> None:
        """A buffer is overwritten, or its memory is gone."""
        assert (rank, buffer) not in self.held, f"buffer {buffer} of rank {rank} is held and would be overwritten"
        known = self.buffers.pop((rank, buffer), None)
        if known:
            os.close(known[0])

    def close(self) -> None:
        """The node is gone."""
        self.held.clear()
        for rank, buffer in list(self.buffers):
            self.drop(rank, buffer)


class BenchWriter:
    """A writer that answers when told; `recovery.api.Child`."""

    def __init__(self, bench: "DiskBench", name: str, directory: str, rank: int, files: FileOps) -> None:
        self.name, self.pid, self.rank = name, 1000 + rank, rank
        self._bench = bench
        self.link, theirs = Link.pair()
        self.link.setblocking(False)
        self._theirs = Link(theirs)
        self._theirs.setblocking(False)
        self.scribe = Scribe(self._theirs, directory, rank, files, no_metadata, {"torch": "none"})

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Child.send`."""
        self.link.send(message, fds)

    def kill(self) -> None:
        """See `Child.kill`; what it was asked and has not done is never done."""
        self._bench.writers.remove(self)
        self.close()
        self._bench.disk.on_child_exit(self, -9)

    def close(self) -> None:
        """Close both ends, and what it holds."""
        self.scribe.close()
        self.link.close()
        self._theirs.close()

    def work(self) -> bool:
        """Do one order and hand on what it answers; False where there is none."""
        try:
            self.scribe.answer()
        except BlockingIOError:
            return False
        while self in self._bench.writers:
            try:
                message, fds = self.link.receive()
            except BlockingIOError:
                break
            self._bench.disk.on_child_message(self, message, fds)
        return True


class DiskBench:
    """Agent, ranks and writers. Implements `recovery.api.Host`."""

    shelf_type = BenchShelf

    def __init__(
        self,
        directory: str,
        *,
        world_size: int = 2,
        interval: int = 10,
        keep: Keep | int | None = 2,
        files: Callable[[int], FileOps] = lambda rank: UnsyncedFiles(),
        clock: Clock = SYSTEM,
        start: bool = True,
    ) -> None:
        self.clock, self.world_size, self.run_dir = clock, world_size, "bench"
        self.events: list[Event] = []
        self.writers: list[BenchWriter] = []
        self.began = 0
        self.generation = -1
        self.rechecks = 0
        self._files = files
        self.shelf = self.shelf_type(world_size)
        self.disk = self.make(directory, interval, keep)
        self.clients = [self._client(rank) for rank in range(world_size)]
        if start:
            self.start()

    def start(self) -> None:
        """The agent begins."""
        try:
            self.disk.start(self)
        except EverstepError:
            assert not self.disk.problems()  # asked and closed, as the agent does
            self.disk.close()
            raise

    def make(self, directory: str, interval: int, keep: Keep | int | None) -> Disk:
        """Make the companion that is tried."""
        return Disk(directory, interval, self.shelf, keep)

    def _client(self, rank: int) -> IntentClient:
        return IntentClient(lambda message: self.disk.on_message(rank, message, ()), tier=self.disk.tier)

    # the Host

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        self.clients[rank].on_message(message)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`."""
        assert entry == "everstep.checkpoint.writer:main"
        rank: int = arguments["rank"]
        self.writers.append(BenchWriter(self, name, arguments["directory"], rank, self._files(rank)))
        return self.writers[-1]

    def emit(self, event: Event) -> None:
        """See `Host.emit`."""
        self.events.append(event)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""

    def recheck(self) -> None:
        """See `Host.recheck`."""
        self.rechecks += 1

    # what a test does

    def enter(self, committed: Sequence[Committed] | None = None) -> int:
        """Enter the next generation, from memory or disk as the plan has it; return the step it begins after."""
        if self.generation >= 0:
            self.disk.on_stopped(self.generation)
        self.generation += 1
        older = self.disk.committed() if committed is None else committed
        sealed = self.shelf.sealed()
        self.shelf.plan = choose(self.world_size, sealed, [], older) if not sealed else self._from_memory(sealed, older)
        self.began = max(0, self.shelf.plan.parent)
        for client in self.clients:
            client.rewound(self.began)
        members = tuple(
            Member(rank, Incarnation("bench", 100 + rank, 1), "node", rank, False, "kept")
            for rank in range(self.world_size)
        )
        self.disk.on_roster(Roster(0, self.generation, members))
        return self.began

    def _from_memory(self, sealed: Sequence[Sealed], older: Sequence[Committed]) -> Plan:
        steps = [{s.step for s in sealed if s.rank == rank} for rank in range(self.world_size)]
        common = max(set.intersection(*steps))
        sources = {s.rank: s.buffer for s in sealed if s.step == common}
        return Plan(common, "memory", "the bench's", sources)

    def end_step(self, rank: int, step: int) -> None:
        """One rank ends a step."""
        due = self.clients[rank].due(step)
        buffer = self.shelf.take(rank, step, self.generation)
        if due:
            self.shelf.hold(rank, buffer)
            self.clients[rank].staged(buffer, lambda: step)

    def steps(self, first: int, last: int, *, write: bool = True) -> None:
        """All ranks end steps `first` to `last`; the writers work between, unless storage is slow."""
        for step in range(first, last + 1):
            for rank in range(self.world_size):
                self.end_step(rank, step)
            if write:
                self.write()

    def write(self, orders: int = 10_000) -> int:
        """Let the writers do up to so many orders; return how many they did."""
        done = 0
        while done < orders:
            if not any(writer.work() for writer in list(self.writers)):
                break
            done += 1
        return done

    def kill(self, rank: int) -> None:
        """A writer is killed."""
        next(writer for writer in self.writers if writer.rank == rank).kill()

    def drain(self, *, completed: bool = True) -> bool:
        """Ask for the end until it is reached, or nothing moves any more."""
        while not self.disk.drained(completed):
            if not self.write():
                return False
        return True

    def close(self) -> None:
        """The agent ends."""
        self.disk.close()
        for writer in self.writers:
            writer.close()
        self.writers.clear()
        self.shelf.close()

    def tiers(self, what: str) -> list[int]:
        """Steps of all tier events of that kind."""
        return [event.step for event in self.events if isinstance(event, TierEvent) and event.what == what]

    def notices(self, level: str) -> list[str]:
        """Sentences of that level."""
        return [event.text for event in self.events if isinstance(event, Notice) and event.level == level]
