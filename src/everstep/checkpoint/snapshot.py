"""The worker's side of the memory tier: takes a snapshot of this rank after every step, and restores one.

    begin(rank, world_size, instructions)     a generation begins; instructions are the agent's, under our prefix
    bind(state)                               what run.steps was given; buffers are asked for and mapped
    restore() … restore_generators()          where the instructions name a snapshot in memory
    take(step, hold)                          at the loop boundary, after everything the body did
    settle()                                  the function is left: nothing of this generation is written any more

Rule 1: a buffer is cleared before it is written and sealed after: a kill at any instant leaves it void.
Rule 2: on the CPU the copy is whole when `take` returns. On CUDA the ticker seals (`poll`), or the next `take`.
Rule 3: the message to the agent costs the loop nothing: steps send none. Only a hold and a larger buffer do.
Rule 4: nothing here outlives a generation but mappings: the model goes with its generation.

`on_message` is called by the thread that owns the link, `poll` by the ticker, everything else by the main thread.
"""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from everstep.checkpoint.buffers import Buffer, BufferSet
from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.core.plan import MEMORY
from everstep.checkpoint.core.rotation import Slot, choose, grants
from everstep.checkpoint.core.segment import HEADER_BYTES, Header, needed_bytes, seal, unseal, wound, write
from everstep.checkpoint.others import Others, Unreadable
from everstep.checkpoint.staging import Copy, DeviceStager, HostStager, Stager
from everstep.checkpoint.walk import NOTHING, StateWalk
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError, DamagedCheckpoint, MemoryShortage, ProtocolError

Message = Mapping[str, Any]
Send = Callable[[Message], None]

ATTACH_DEADLINE_S = 300.0  # buffers of tens of GiB are allocated in full before they are handed out
GROWTH = 1.25
TOLD = 0  # the number of whatever the agent holds a buffer for when it hands it out


@dataclass(frozen=True, slots=True)
class Taken:
    """One snapshot. `hold`: the number of the hold by which the buffer stays as it is; 0: it is not held."""

    step: int
    buffer: int
    bytes: int
    seconds: float
    hold: int = 0
    sequence: int = 0  # what the buffer holds until it is taken for another snapshot; see `keep`

    @property
    def held(self) -> bool:
        """True where the buffer stays as it is until it is released."""
        return self.hold > 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was restored."""

    step: int
    tier: str
    bytes: int
    seconds: float
    why: str


@dataclass(slots=True)
class _Pending:
    buffer: Buffer
    sequence: int
    copy: Copy


class Snapshotter:
    """One per worker process."""

    def __init__(self, send: Send, *, clock: Clock = SYSTEM, deadline_s: float = ATTACH_DEADLINE_S) -> None:
        self._send = send
        self._clock = clock
        self._deadline_s = deadline_s
        self._replies: queue.SimpleQueue[tuple[Message, Sequence[int]]] = queue.SimpleQueue()
        self._asked = 0
        self._sets: dict[int, BufferSet] = {}
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # holds reach the agent in the order of their numbers, and before an attach
        self._open: dict[int, set[int]] = {}  # of each held buffer the holds on it; TOLD: the agent's own
        self._holds = 0  # so many holds were told to the agent
        self._pending: _Pending | None = None
        self._sequence = 0
        self._taken_in_set = 0
        self._on_device = False
        self._others: Others | None = None
        self._restored: tuple[Layout, Callable[[Leaf], bytearray | memoryview]] | None = None
        self._stager: Stager = HostStager()
        self.rank, self.world_size = 0, 1
        self.instructions: Message = {}
        self.walk: StateWalk | None = None

    # A generation.

    def begin(self, rank: int, world_size: int, instructions: Message) -> None:
        """A generation begins: `instructions` is what the shelf said to this rank with the roster."""
        self.settle()
        if rank != self.rank:
            self._keep({})  # state follows the rank number (EXPERIMENTS B6)
        self.rank, self.world_size, self.instructions = rank, world_size, instructions

    def bind(self, state: Mapping[str, object], *, allow_pickle: bool = False) -> None:
        """Take the objects whose state is kept, and have buffers that hold it. `allow_pickle`: see `StateWalk`.

        Raises TypeError naming what cannot be kept, MemoryShortage where the node cannot hold the snapshots.
        """
        self.walk = StateWalk(state, rank=self.rank, world_size=self.world_size, allow_pickle=allow_pickle)
        self._on_device = self.walk.on_device()
        self._stager = DeviceStager(self.walk.optimizers) if self._on_device else HostStager()
        self._attach(self.walk.estimate())

    def rebind(self, state: Mapping[str, object], *, allow_pickle: bool = False) -> None:
        """Take other objects in the same generation: what is saved has changed. Raises as `bind` does."""
        self._finish_pending()
        self._stager.close()
        if not self._sets:
            self.bind(state, allow_pickle=allow_pickle)
            return
        self.walk = StateWalk(state, rank=self.rank, world_size=self.world_size, allow_pickle=allow_pickle)
        self._on_device = self.walk.on_device()
        self._stager = DeviceStager(self.walk.optimizers) if self._on_device else HostStager()
        size = self.walk.estimate()
        if size > self._current().size:
            self._attach(int(size * GROWTH))
        elif self._on_device:
            self._current().page_lock()

    def unbind(self) -> None:
        """Let go of what is bound, as soon as it is copied; the snapshots stay, and `rebind` takes the next (CS-10)."""
        self._finish_pending()
        self._stager.close()
        self._stager, self.walk = HostStager(), None
        for each in self._sets.values():
            each.forget()

    def source(self) -> tuple[Layout, Callable[[Leaf], bytearray | memoryview]] | None:
        """Return the snapshot that the instructions name, for reading; None where memory holds none.

        DamagedCheckpoint where it cannot be read: the agent is told.
        """
        source = self.instructions.get("restore")
        return None if source is None or source["tier"] != MEMORY else self._source(source)

    def restore(self) -> Recovered | None:
        """Write the chosen snapshot into the bound objects, generators excepted; None where memory holds none.

        DamagedCheckpoint where it cannot be read: the agent is told, and the next plan does without it.
        """
        source = self.instructions.get("restore")
        if source is None or source["tier"] != MEMORY:
            return None
        if "saved_by" in source:
            return self._restore_from_others(source["step"], source.get("from", MEMORY))
        return self.restore_from(source["step"], source.get("from", MEMORY), *self._source(source))

    def restore_from(
        self,
        step: int,
        tier: str,
        layout: Layout,
        payload: Callable[[Leaf], bytearray | memoryview],
        refused: Mapping[str, str] = NOTHING,
    ) -> Recovered:
        """The same from a slower tier, which has read and verified the bytes. `refused`: see `StateWalk.restore`."""
        started = self._clock.now()
        self._restored = layout, payload
        size = self.bound.restore(layout, payload, refused)
        return Recovered(step, tier, size, self._clock.now() - started, str(self.instructions.get("reason", "")))

    def _restore_from_others(self, step: int, tier: str) -> Recovered:
        """From what all ranks of a world of another size have in this node's memory."""
        self._asked += 1
        self._send({"kind": "snapshot.open", "ask": self._asked})
        message, fds = self._reply()
        try:
            others = self._others = Others(step, message["ranks"], message["buffers"], fds)
            made = self.bound.reshard(others.layouts, others.digest)
            others.take(made)
            recovered = self.restore_from(step, tier, made.layout, others.bytes_of, made.refused)
            others.check()
        except Unreadable as error:
            self._damaged(error.buffer, step, error.why, of=error.rank)
        return recovered

    def restore_generators(self) -> None:
        """Set the random generators: after everything that draws at construction, right before the first step."""
        if self._restored is not None:
            self.bound.restore_generators(*self._restored)
            self._restored = None
        if self._others is not None:
            self._others.close()
            self._others = None

    def resettle(self, step: int) -> None:
        """Have what was taken over from a world of another size sealed as this world's; the other's may go then."""
        self.take(step)
        self._finish_pending()
        self._send({"kind": "snapshot.settled", "step": step})

    def settle(self) -> None:
        """End what is under way and let go of the model; whole copies are sealed. Nothing is written afterwards."""
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.copy.wait()
            seal(pending.buffer.bytes, pending.sequence)
        self._stager.close()
        self._stager, self.walk, self._restored = HostStager(), None, None
        if self._others is not None:
            self._others.close()
            self._others = None
        for each in self._sets.values():
            each.reread()

    def finish(self) -> None:
        """Wait until the last snapshot is whole, and seal it."""
        self._finish_pending()

    def close(self) -> None:
        """The worker ends, or takes no more snapshots."""
        self.settle()
        self._keep({})

    # A step.

    def take(self, step: int, hold: bool = False) -> Taken:
        """Take the snapshot after `step`; `hold` keeps its buffer for a slower tier where one can be spared."""
        started = self._clock.now()
        walk = self.bound
        layout, parts = walk.collect()
        meta = walk.encode(layout)
        size = needed_bytes(walk.payload_bytes, len(meta))
        self._finish_pending()
        if size > self._current().size:
            self._attach(int(size * GROWTH))
        buffer = self._next()
        unseal(buffer.bytes)
        early, late = buffer.groups(HEADER_BYTES, parts[: walk.stable], parts[walk.stable :], self._stager.scratch)
        under_way = self._stager.stage(early, late)
        write(buffer.bytes, self._header(step, walk.payload_bytes, len(meta)), meta)
        if under_way is None:
            seal(buffer.bytes, self._sequence)
        else:
            self._pending = _Pending(buffer, self._sequence, under_way)
        number = self.keep(buffer.number, self._sequence) if hold else 0
        self._after()
        return Taken(step, buffer.number, size, self._clock.now() - started, number, self._sequence)

    def poll(self) -> bool:
        """Seal a copy that is done; True when none is under way. Any thread; never waits."""
        with self._lock:
            if self._pending is not None and self._pending.copy.done():
                seal(self._pending.buffer.bytes, self._pending.sequence)
                self._pending = None
            return self._pending is None

    def release(self, buffer: int, heard: int) -> None:
        """The agent, which has heard of holds up to number `heard`, needs the buffer no more. Any thread."""
        with self._lock:
            self._let_go(buffer, {number for number in self._open.get(buffer, ()) if number <= heard})

    def forgo(self, buffer: int, hold: int) -> None:
        """One hold of a buffer is for nobody: whoever told of it sees to it that the agent hears so. Any thread."""
        with self._lock:
            self._let_go(buffer, {hold})

    def keep(self, buffer: int, sequence: int) -> int:
        """Hold a buffer that is in use by now or was filled just now, and tell; return the number of the hold.

        0 where it holds another snapshot by now, or too few buffers would be left. Any thread.
        """
        with self._telling:
            with self._lock:
                found = next((s.buffers[buffer] for s in self._sets.values() if buffer in s.buffers), None)
                rotating = self._current().buffers
                if found is None or found.sequence != sequence:
                    return 0
                if not grants(len(rotating), self._open.keys() & rotating.keys(), buffer):
                    return 0
                self._holds += 1
                number = self._holds  # what the agent releases meanwhile is an earlier one
                self._open.setdefault(buffer, set()).add(number)
            self._send({"kind": "snapshot.hold", "buffer": buffer, "hold": number})
        return number

    def holds(self, taken: Taken) -> Callable[[], int]:
        """Return what gives a hold of a held snapshot to each that asks: that of `take` first. 0: it is not held."""
        first = [taken.hold]
        return lambda: first.pop() if first else (taken.hold and self.keep(taken.buffer, taken.sequence))

    def lost(self, text: str) -> None:
        """The agent is gone: whoever waits for it need not."""
        self._replies.put(({"kind": "snapshot.lost", "text": text}, ()))

    # The agent.

    def on_message(self, message: Message, fds: Sequence[int]) -> None:
        """A message of our prefix has come over the link."""
        if message["kind"] == "snapshot.released":
            self.release(message["buffer"], message["hold"])
        else:
            self._replies.put((message, fds))

    def _attach(self, size: int) -> None:
        """Have buffers of at least `size` bytes mapped, and know which are held."""
        self._asked += 1
        with self._telling:
            told = self._holds
            self._send({"kind": "snapshot.attach", "ask": self._asked, "bytes": size, "have": sorted(self._sets)})
        message, fds = self._reply()
        if message["kind"] == "snapshot.refused":
            raise MemoryShortage(message["text"])
        if message["kind"] == "snapshot.lost_copy":
            text = f"rank {self.rank}: {message['text']}"
            raise DamagedCheckpoint(f"{text}. It is struck out; the next generation begins from another copy.")
        self.instructions = message.get("told", self.instructions)
        taken = 0
        kept: dict[int, BufferSet] = {}
        for body in message["sets"]:
            number, count = body["set"], len(body["buffers"])
            if not body["sent"]:
                kept[number] = self._sets[number]
                continue
            kept[number] = BufferSet.from_message(body, fds[taken : taken + count])
            taken += count
        self._keep(kept)
        self._taken_in_set = 0
        for each in kept.values():
            each.reread()
            if self._on_device:
                each.page_lock()
        with self._lock:  # of holds up to this one the agent knew
            later = {b: left for b, numbers in self._open.items() if (left := {n for n in numbers if n > told})}
            self._open = {b: {TOLD} | later.get(b, set()) for b in message["held"]} | {
                b: numbers for b, numbers in later.items() if b not in message["held"]
            }
        self._sequence = max((b.sequence for s in kept.values() for b in s.buffers.values()), default=0)

    def _reply(self) -> tuple[Message, Sequence[int]]:
        deadline = self._clock.now() + self._deadline_s
        while (left := deadline - self._clock.now()) > 0:
            try:
                message, fds = self._replies.get(timeout=left)
            except queue.Empty:
                break
            if message["kind"] == "snapshot.lost":
                raise CheckpointError(message["text"])
            if message.get("ask") == self._asked:
                return message, fds
            for fd in fds:  # the answer to a question of a generation that was interrupted
                os.close(fd)
        raise ProtocolError(
            f"rank {self.rank}: the agent has not answered {self._deadline_s:.0f} s after it was asked for snapshot "
            "buffers. It allocates them in full first; look at its log for a shortage of memory or a blocked loop."
        )

    # Inside.

    @property
    def bound(self) -> StateWalk:
        """The walk over what was bound. Raises ProtocolError where nothing is."""
        if self.walk is None:
            raise ProtocolError("no state is bound: call bind(state) after begin() and before restore() or take().")
        return self.walk

    def _keep(self, sets: dict[int, BufferSet]) -> None:
        for number, each in self._sets.items():
            if number not in sets:
                each.drop()
        self._sets = sets

    def _current(self) -> BufferSet:
        return self._sets[max(self._sets)]

    def _source(self, source: Message) -> tuple[Layout, Callable[[Leaf], memoryview]]:
        number, step = source["buffer"], source["step"]
        buffer = next((s.buffers[number] for s in self._sets.values() if number in s.buffers), None)
        header = "not among the buffers of this rank" if buffer is None else buffer.header()
        if buffer is None or isinstance(header, str) or header.step != step:
            why = header if isinstance(header, str) else f"holds step {header.step}"
            self._damaged(number, step, why)
        if why := wound(buffer.bytes, header):
            self._damaged(number, step, why)
        try:
            return buffer.layout(header), lambda leaf: buffer.payload(header, leaf)
        except DamagedCheckpoint as error:
            self._damaged(number, step, str(error))

    def _damaged(self, buffer: int, step: int, why: str, of: int | None = None) -> NoReturn:
        rank = self.rank if of is None else of
        self._send({"kind": "snapshot.damaged", "buffer": buffer, "step": step, "why": why, "of": rank})
        raise DamagedCheckpoint(
            f"rank {rank}: buffer {buffer} should hold the snapshot of step {step} but: {why}. It is struck out; "
            "the next generation begins from another copy."
        )

    def _header(self, step: int, payload_bytes: int, meta_bytes: int) -> Header:
        epoch, generation, parent = self.instructions["lineage"]
        return Header(
            self._sequence, step, epoch, generation, parent, self.rank, self.world_size, payload_bytes, meta_bytes
        )

    def _next(self) -> Buffer:
        buffers = self._current().buffers
        with self._lock:
            held = self._open.keys() & buffers.keys()
            number = choose([Slot(b.number, b.sequence) for b in buffers.values()], held)
            if number is None:
                raise ProtocolError(
                    f"rank {self.rank}: all {len(buffers)} snapshot buffers are held; a hold is granted only while "
                    "three are left to rotate."
                )
            self._sequence += 1
            buffers[number].sequence = self._sequence  # with the choice: `keep` may ask for what it held
        return buffers[number]

    def _finish_pending(self) -> None:
        """The host is a step ahead of the device: wait for the last copy, or a kill could find no sealed one."""
        pending = self._pending
        if pending is not None and not self.poll():
            pending.copy.wait()
            self.poll()

    def _let_go(self, buffer: int, numbers: set[int]) -> None:
        """Under the lock. The buffer is free when no hold is left."""
        if buffer in self._open:
            self._open[buffer] -= numbers
            if not self._open[buffer]:
                del self._open[buffer]

    def _after(self) -> None:
        self._taken_in_set += 1
        if len(self._sets) > 1 and self._taken_in_set == len(self._current().buffers):
            old = sorted(self._sets)[:-1]
            self._keep({max(self._sets): self._current()})
            self._send({"kind": "snapshot.outgrown", "sets": old})
