"""Porters and workers of a job that never ran, played over a `Net`; see `peer_world`."""

import functools
import json
import mmap
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.rotation import Slot, choose, grants
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.intent_client import IntentClient
from everstep.recovery.api import Message
from everstep.testing.nodes import Net, SimNode

PAYLOAD = 512
PARTS = 3


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
    expected: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    def __post_init__(self) -> None:
        self.name = f"porter {self.node.name} {self.number}"

    def say(self, message: Message) -> None:
        """Tell the agent, later."""
        text = json.dumps(message)

        def deliver() -> None:
            if self.node.alive:
                self.node.companions["peer"].on_child_message(self, json.loads(text), ())

        self.world.net.put((self.name, self.node.name, "up"), deliver)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Child.send`."""
        mine = [self.world.dup(fd) for fd in fds]
        self.world.net.put((self.node.name, self.name, "down"), lambda: self._hear(message, mine))

    def _hear(self, message: Message, fds: list[int]) -> None:
        if not self.alive:
            return
        if message["kind"] == "expect":
            self.expected[message["ticket"]] = (message["transfer"], fds[0])
            self.say({"kind": "expecting", "transfer": message["transfer"]})
        elif message["kind"] == "forget":
            for ticket, (transfer, _) in list(self.expected.items()):
                if transfer == message["transfer"]:
                    del self.expected[ticket]
                    self.say({"kind": "refused", "transfer": transfer, "text": "nobody has come to send it"})
        elif message["kind"] == "send":
            self._send(message, fds[0])

    def _send(self, order: Message, fd: int) -> None:
        there = self.world.porter_at(order["host"], order["port"])
        with mmap.mmap(fd, 0) as memory, memoryview(memory) as view:
            header = segment.parse(view)
            wanted = (order["rank"], order["step"], order["epoch"], order["generation"])
            if isinstance(header, str) or (header.rank, header.step, header.epoch, header.generation) != wanted:
                self.say({"kind": "refused", "transfer": order["transfer"], "text": f"{header}"})
                return
            if segment.checksum_of(view, header) is None:
                segment.put_checksum(view, header, segment.checksum(view, header))
            length = header.meta_offset + header.meta_bytes
        if there is None or not there.alive or order["ticket"] not in there.expected:
            self.say({"kind": "refused", "transfer": order["transfer"], "text": "nobody is there, or it is not wanted"})
            return
        transfer, into = there.expected.pop(order["ticket"])
        there.say({"kind": "begun", "transfer": transfer})
        size = -(-(length - segment.HEADER_BYTES) // PARTS)
        starts = [segment.HEADER_BYTES + part * size for part in range(PARTS)]
        for cut in [*[(start, min(length, start + size)) for start in starts], None]:
            part = functools.partial(self._part, there, transfer, order["transfer"], fd, into, cut, length)
            self.world.net.put((self.name, there.name, "tcp"), part)

    def _part(
        self, there: "SimPorter", theirs: str, ours: str, fd: int, into: int, cut: tuple[int, int] | None, length: int
    ) -> None:
        """One part arrives; the last brings the header. Whoever is gone is told of by the other side."""
        if not self.alive or not there.alive:
            if cut is None and there.alive:
                there.say({"kind": "refused", "transfer": theirs, "text": "the sender has gone"})
            if cut is None and self.alive:
                self.say({"kind": "refused", "transfer": ours, "text": "the receiver has gone"})
            return
        with mmap.mmap(fd, 0) as source, mmap.mmap(into, 0) as target:
            if cut is not None:
                target[slice(*cut)] = source[slice(*cut)]
                return
            with memoryview(target) as view:
                why = segment.complete(view, source[: segment.HEADER_BYTES])
        if isinstance(why, str):
            there.say({"kind": "refused", "transfer": theirs, "text": why})
            self.say({"kind": "refused", "transfer": ours, "text": why})
        else:
            there.say({"kind": "received", "transfer": theirs, "bytes": length, "seconds": 0.0})
            self.say({"kind": "sent", "transfer": ours, "bytes": length, "seconds": 0.0})

    def kill(self) -> None:
        """See `Child.kill`."""
        if self.alive:
            self.alive = False

            def deliver() -> None:
                if self.node.alive:
                    self.node.companions["peer"].on_child_exit(self, -9)

            self.world.net.put((self.name, self.node.name, "up"), deliver)


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
        self.intents = IntentClient(lambda m: node.hear(rank, m), tier="peer")
        node.workers[rank] = self.hear

    def assigned(self, told: Mapping[str, Message]) -> None:
        """A generation begins."""
        self.told, self.began, self.failed = None, None, ""
        if "lineage" in told["snapshot"]:
            self.told = told["snapshot"]
        self.intents.rewound(0)
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
        if kind.startswith("peer."):
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
            self.step = source["step"]
            self.began = (self.step, -2)
        else:
            with memoryview(self.maps[source["buffer"]]) as view:
                header = segment.parse(view)
                why = header if isinstance(header, str) else segment.wound(view, header)
                if why or not isinstance(header, Header) or header.step != source["step"]:
                    self.failed = why or "another step"
                    body = {"kind": "snapshot.damaged", "buffer": source["buffer"], "step": source["step"], "why": why}
                    self.node.hear(self.rank, body)
                    return
                found = bytes(view[header.payload_offset :][:PAYLOAD])
            if header.rank != self.rank or found != payload(self.rank, header.step, header.generation):
                raise Broken(f"rank {self.rank} restored something else: {header}")
            self.step, self.began = header.step, (header.step, header.generation)
        self.intents.rewound(self.step)

    def end_step(self) -> None:
        """End a step, and take its snapshot."""
        self.step += 1
        due = self.intents.due(self.step)
        buffer, hold = self._take(self.step, hold=due)
        if due:
            self.intents.staged(buffer, lambda: hold)

    def _take(self, step: int, *, hold: bool = False) -> tuple[int, int]:
        assert self.told is not None, "it has begun"
        headers = {buffer: self._header(buffer) for buffer in self.current}
        slots = [Slot(b, h.sequence if isinstance(h, Header) else 0) for b, h in headers.items()]
        held = self.held.keys() & set(self.current)
        number = choose(slots, held)
        if number is None:
            raise Broken(f"rank {self.rank}: every buffer is held")
        granted = hold and grants(len(self.current), held, number)
        self.sequence += 1
        epoch, generation, parent = self.told["lineage"]
        header = Header(self.sequence, step, epoch, generation, parent, self.rank, self.world.ranks, PAYLOAD, 2)
        with memoryview(self.maps[number]) as view:
            segment.unseal(view)
            view[segment.HEADER_BYTES : segment.HEADER_BYTES + PAYLOAD] = payload(self.rank, step, generation)
            segment.write(view, header, b"{}")
            segment.seal(view, self.sequence)
        if granted:
            self.holds += 1
            self.held[number] = self.holds
            self.node.hear(self.rank, {"kind": "snapshot.hold", "buffer": number, "hold": self.holds})
        return number, self.holds if granted else 0

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
