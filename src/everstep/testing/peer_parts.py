"""Porters and workers of a job that never ran, played over a `Net`; see `peer_world`."""

import contextlib
import functools
import json
import mmap
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from everstep.checkpoint.carrying import held_here
from everstep.checkpoint.core import segment
from everstep.checkpoint.core.alike import lacking
from everstep.checkpoint.core.rotation import Slot, choose, grants
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.intent_client import READERS, Disks
from everstep.recovery.api import Message
from everstep.testing.nodes import Net, SimNode

PAYLOAD = 512
PARTS = 3
LEAST_HERE = 64
"""Bytes of a tensor that is worth leaving out: a world's are small."""


class World(Protocol):
    """What they ask of their world."""

    net: Net
    size: int
    ranks: int

    def dup(self, fd: int) -> int:
        """Duplicate a descriptor; the world closes it."""
        ...

    def porter_at(self, host: str, port: int) -> "SimPorter | None":
        """Return whoever listens there."""
        ...

    def state(self, rank: int, step: int, generation: int) -> tuple[bytes, bytes]:
        """Return what a rank's state is after a step that a generation has made, and its description."""
        ...

    def durable(self, rank: int, source: Message) -> tuple[int, int] | str:
        """Return step and generation of what a rank finds on a disk, or why it cannot be had."""
        ...


def payload(rank: int, step: int, generation: int) -> bytes:
    """Return what a rank's state is after a step that a generation has made."""
    return random.Random(f"{rank} {step} {generation}").randbytes(PAYLOAD)


class Broken(AssertionError):
    """A law does not hold."""


@dataclass(eq=False)
class SimPorter:
    """A porter; `recovery.api.Child`. Bytes go in parts, so that it can die between any two."""

    world: World
    node: SimNode
    number: int
    pid: int = 1
    name: str = ""
    alive: bool = True
    expected: dict[str, tuple[str, list[int]]] = field(default_factory=dict[str, tuple[str, list[int]]])

    def __post_init__(self) -> None:
        self.name = f"porter {self.node.name} {self.number}"

    def say(self, message: Message) -> None:
        """Tell the agent, later."""
        text = json.dumps(message)

        def deliver() -> None:
            if self.node.alive:
                self.node.companions["peer"].on_child_message(self, json.loads(text), ())

        self.world.net.put((self.name, self.node.name, "up"), deliver)

    def refuse(self, transfer: str, text: str, *, again: bool = False) -> None:
        """Tell the agent that a transfer has come to nothing; `again`: it was the line."""
        self.say({"kind": "refused", "transfer": transfer, "text": text, "again": again})

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Child.send`."""
        mine = [self.world.dup(fd) for fd in fds]
        self.world.net.put((self.node.name, self.name, "down"), lambda: self._hear(message, mine))

    def _hear(self, message: Message, fds: list[int]) -> None:
        if not self.alive:
            return
        if message["kind"] == "expect":
            self.expected[message["ticket"]] = (message["transfer"], fds)
            self.say({"kind": "expecting", "transfer": message["transfer"]})
        elif message["kind"] == "forget":
            for ticket, (transfer, _) in list(self.expected.items()):
                if transfer == message["transfer"]:
                    del self.expected[ticket]
                    self.refuse(transfer, "nobody has come to send it", again=True)
        elif message["kind"] == "send":
            self._send(message, fds[0])

    def _send(self, order: Message, fd: int) -> None:
        there = self.world.porter_at(order["host"], order["port"])
        with mmap.mmap(fd, 0) as memory, memoryview(memory) as view:
            header = segment.parse(view)
            wanted = (order["rank"], order["step"], order["epoch"], order["generation"])
            if isinstance(header, str) or (header.rank, header.step, header.epoch, header.generation) != wanted:
                self.refuse(order["transfer"], f"{header}")
                return
            if segment.checksum_of(view, header) is None:
                segment.put_checksum(view, header, segment.checksum(view, header))
        if there is None or not there.alive or order["ticket"] not in there.expected:
            self.refuse(order["transfer"], "nobody is there, or it is not wanted", again=True)
            return
        transfer, into = there.expected.pop(order["ticket"])
        there.say({"kind": "begun", "transfer": transfer})
        carried = _Carried(there, transfer, order["transfer"], fd, into, header)
        for part in range(PARTS + 1):
            self.world.net.put((self.name, there.name, "tcp"), functools.partial(self._part, carried, part))

    def _part(self, carried: "_Carried", part: int) -> None:
        """One part arrives; the last brings the header. Whoever is gone is told of by the other side."""
        there, last = carried.there, part == PARTS
        if not self.alive or not there.alive:
            if last and there.alive:
                there.refuse(carried.theirs, "the sender has gone", again=True)
            if last and self.alive:
                self.refuse(carried.ours, "the receiver has gone", again=True)
            return
        if not last:
            carried.take(part)
            return
        why = carried.complete()
        if why:
            there.refuse(carried.theirs, why)
            self.refuse(carried.ours, why)
        else:
            there.say({"kind": "received", "transfer": carried.theirs, "bytes": carried.came, "seconds": 0.0})
            self.say({"kind": "sent", "transfer": carried.ours, "bytes": carried.came, "seconds": 0.0})

    def kill(self) -> None:
        """See `Child.kill`."""
        if self.alive:
            self.alive = False

            def deliver() -> None:
                if self.node.alive:
                    self.node.companions["peer"].on_child_exit(self, -9)

            self.world.net.put((self.name, self.node.name, "up"), deliver)


@dataclass
class _Carried:
    """One snapshot on its way; what snapshots there hold of it is copied there, as `carrying` does."""

    there: SimPorter
    theirs: str
    ours: str
    fd: int
    into: Sequence[int]
    header: Header
    had: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    came: int = 0

    @property
    def _length(self) -> int:
        return self.header.meta_offset + self.header.meta_bytes

    def take(self, part: int) -> None:
        """Have one part of what is not there already; the first looks what is."""
        if part == 0:
            self._copy([(self.header.meta_offset, self._length)])
            self._look()
            return
        wanted = lacking([(b, e) for b, e, _ in self.had], segment.HEADER_BYTES, self.header.meta_offset)
        self._copy(wanted[part - 1 :: PARTS - 1])

    def _look(self) -> None:
        with contextlib.ExitStack() as open_:
            target = open_.enter_context(mmap.mmap(self.into[0], 0))
            view = open_.enter_context(memoryview(target))
            for part in held_here(view, self.header, self.into[1:], LEAST_HERE, open_):
                found = bytes(part.of[part.source : part.source + part.end - part.begin])
                self.had.append((part.begin, part.end, found))

    def complete(self) -> str:
        """Put it together and verify it; all of it comes where it does not match. Return why it is not kept."""
        self.came += segment.HEADER_BYTES
        with mmap.mmap(self.into[0], 0) as target:
            for begin, end, found in self.had:
                target[begin:end] = found
        why = self._verified()
        if why and self.had:
            self._copy([(segment.HEADER_BYTES, self.header.meta_offset)])
            why = self._verified()
        return why

    def _verified(self) -> str:
        with mmap.mmap(self.fd, 0) as source, mmap.mmap(self.into[0], 0) as target, memoryview(target) as view:
            found = segment.complete(view, source[: segment.HEADER_BYTES])
        return found if isinstance(found, str) else ""

    def _copy(self, ranges: Sequence[tuple[int, int]]) -> None:
        with mmap.mmap(self.fd, 0) as source, mmap.mmap(self.into[0], 0) as target:
            for begin, end in ranges:
                target[begin:end] = source[begin:end]
                self.came += end - begin


class SimWorker:
    """One rank's process."""

    def __init__(self, world: World, rank: int, node: SimNode) -> None:
        self.world, self.rank, self.node = world, rank, node
        self.maps: dict[int, mmap.mmap] = {}
        self.current: list[int] = []
        self.held: dict[int, int] = {}  # buffer → number of the newest hold; 0: what the agent told of
        self.holds = 0
        self.told: Message | None = None
        self.began: tuple[int, int] | None = None  # step and the generation that made it
        self.step = 0
        self.sequence = 0
        self.failed = ""
        self.asked = 0
        self.intents = Disks(lambda m: node.hear(rank, m))
        node.workers[rank] = self.hear

    def assigned(self, told: Mapping[str, Message]) -> None:
        """A generation begins."""
        self.told, self.began, self.failed = None, None, ""
        if "lineage" in told["snapshot"]:
            self.told = told["snapshot"]
        self.intents.rewound(0)  # intents of the next generation come after its assignment
        self.asked += 1
        have = sorted({number for number, _ in self.sets})
        self.node.hear(
            self.rank, {"kind": "snapshot.attach", "ask": self.asked, "bytes": self.world.size, "have": have}
        )

    sets: Sequence[tuple[int, tuple[int, ...]]] = ()

    def hear(self, message: Message, fds: Sequence[int]) -> None:
        """The agent speaks."""
        try:
            self._heard(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _heard(self, message: Message, fds: Sequence[int]) -> None:
        kind = message["kind"]
        if kind.partition(".")[0] in READERS:
            self.intents.on_message(message)
        elif kind == "snapshot.released":
            if message["hold"] >= self.held.get(message["buffer"], 0):
                self.held.pop(message["buffer"], None)
        elif message.get("ask") != self.asked:
            return
        elif kind == "snapshot.buffers":
            self._attached(message, fds)
        else:
            self.failed = str(message.get("text"))

    def _attached(self, message: Message, fds: Sequence[int]) -> None:
        sent = iter(fds)
        maps: dict[int, mmap.mmap] = {}
        sets: list[tuple[int, tuple[int, ...]]] = []
        for each in message["sets"]:
            sets.append((each["set"], tuple(each["buffers"])))
            for buffer in each["buffers"]:
                maps[buffer] = mmap.mmap(next(sent), each["bytes"]) if each["sent"] else self.maps[buffer]
        self._map(maps)
        self.sets = sets
        self.current = list(max(sets)[1])
        self.told = message.get("told", self.told)
        self.held = dict.fromkeys(message["held"], 0)
        found = [self._header(buffer) for buffer in self.maps]
        self.sequence = max((h.sequence for h in found if isinstance(h, Header)), default=0)
        self._restore()

    def _restore(self) -> None:
        assert self.told is not None, "buffers come with what a rank begins from"
        source = self.told["restore"]
        if source is None:
            self.step, self.began = 0, (0, -1)
            self._take(0)
        elif source["tier"] != "memory":
            found = self.world.durable(self.rank, source)
            if isinstance(found, str):
                self.failed = found
                body = {"kind": "snapshot.damaged", "tier": source["tier"], "step": source["step"], "why": found}
                self.node.hear(self.rank, body)
                self.intents.damaged(source["tier"], source["step"], found)
                return
            self.step, self.began = found[0], found
        else:
            with memoryview(self.maps[source["buffer"]]) as view:
                header = segment.parse(view)
                why = header if isinstance(header, str) else segment.wound(view, header)
                if why or not isinstance(header, Header) or header.step != source["step"]:
                    self.failed = why or "another step"
                    body = {"kind": "snapshot.damaged", "buffer": source["buffer"], "step": source["step"], "why": why}
                    self.node.hear(self.rank, body)
                    return
                state = bytes(view[header.payload_offset :][: header.payload_bytes])
            if header.rank != self.rank or state != self.world.state(self.rank, header.step, header.generation)[0]:
                raise Broken(f"rank {self.rank} restored something else: {header}")
            self.step, self.began = header.step, (header.step, header.generation)

    def end_step(self) -> None:
        """End a step, and take its snapshot."""
        self.step += 1
        due = self.intents.due(self.step)
        buffer, hold = self._take(self.step, hold=due)
        if due:
            holds = [hold]
            self.intents.staged(buffer, lambda: holds.pop() if holds else (hold and self._hold(buffer)))

    def _take(self, step: int, *, hold: bool = False) -> tuple[int, int]:
        assert self.told is not None, "it has begun"
        headers = {buffer: self._header(buffer) for buffer in self.current}
        slots = [Slot(b, h.sequence if isinstance(h, Header) else 0) for b, h in headers.items()]
        held = self.held.keys() & set(self.current)
        number = choose(slots, held)
        if number is None:
            raise Broken(f"rank {self.rank}: every buffer is held")
        self.sequence += 1
        epoch, generation, parent = self.told["lineage"]
        state, meta = self.world.state(self.rank, step, generation)
        sizes = len(state), len(meta)
        header = Header(self.sequence, step, epoch, generation, parent, self.rank, self.world.ranks, *sizes)
        with memoryview(self.maps[number]) as view:
            segment.unseal(view)
            view[segment.HEADER_BYTES : segment.HEADER_BYTES + len(state)] = state
            segment.write(view, header, meta)
            segment.seal(view, self.sequence)
        return number, self._hold(number) if hold else 0

    def _hold(self, number: int) -> int:
        """Keep a buffer for one more tier; 0 where too few would be left."""
        if not grants(len(self.current), self.held.keys() & set(self.current), number):
            return 0
        self.holds += 1
        self.held[number] = self.holds
        self.node.hear(self.rank, {"kind": "snapshot.hold", "buffer": number, "hold": self.holds})
        return self.holds

    def _header(self, buffer: int) -> Header | str:
        with memoryview(self.maps[buffer]) as view:
            return segment.parse(view)

    def _map(self, maps: dict[int, mmap.mmap]) -> None:
        for buffer, old in self.maps.items():
            if maps.get(buffer) is not old:
                old.close()
        self.maps = maps

    def close(self) -> None:
        """The process is gone."""
        if self.node.workers.get(self.rank) == self.hear:
            del self.node.workers[self.rank]
        self._map({})
