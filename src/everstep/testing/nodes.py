"""Several nodes in one process: hosts that carry words between companions, in any order that a network may choose.

What one node tells another comes in the order in which it was told; nothing is said of the order between pairs. `Net`
holds what is on its way until it is delivered; a node that goes takes with it what it has not been heard to say. Words
are packed and unpacked as on a wire.
"""

import json
import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.clock import Clock
from everstep.events import Event, Notice, TierEvent
from everstep.recovery.api import Child, Companion, Message
from everstep.recovery.core.words import Incarnation, Member, Roster

Deliver = Callable[[], None]
Channel = tuple[str, str, str]
"""Who speaks to whom, and as what."""


class StillClock:
    """A clock that moves when it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """See `Clock.now`."""
        return self.now_s

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self.now_s

    def wait(self, event: Any, timeout_s: float) -> bool:
        """See `Clock.wait`: nothing is waited for."""
        del timeout_s
        return bool(event.is_set())

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self.now_s += seconds


class Net:
    """What is on its way: queues that keep their order each."""

    def __init__(self) -> None:
        self._queues: dict[Channel, deque[Deliver]] = {}

    def put(self, channel: Channel, deliver: Deliver) -> None:
        """Say something on a channel."""
        self._queues.setdefault(channel, deque()).append(deliver)

    @property
    def open(self) -> list[Channel]:
        """Channels on which something is to be heard."""
        return sorted(channel for channel, queue in self._queues.items() if queue)

    def deliver(self, channel: Channel) -> None:
        """Have the next word of a channel heard."""
        self._queues[channel].popleft()()

    def cut(self, name: str) -> None:
        """Whoever bears this name says and hears nothing more; who hands on, hands on to nobody."""
        for channel in [c for c in self._queues if name in c[:2]]:
            queue = self._queues.pop(channel)
            while queue and channel[2] == "down":
                queue.popleft()()


@dataclass(eq=False)
class SimNode:
    """One node: implements `recovery.api.NodeHost`; the companions of its agent are added with `ride`."""

    name: str
    net: Net
    clock: Clock
    peers: dict[str, "SimNode"]
    spawns: Callable[["SimNode", str, Mapping[str, Any]], Child] | None = None
    run_dir: str = ""
    world_size: int = 0
    alive: bool = True
    address: str = ""  # of all nodes; empty: a made-up one of each
    losing: tuple[float, random.Random | None] = (0.0, None)  # the share of what is told that is lost
    events: list[Event] = field(default_factory=list[Event])
    workers: dict[int, Callable[[Message, Sequence[int]], None]] = field(
        default_factory=dict[int, Callable[[Message, Sequence[int]], None]]
    )

    def __post_init__(self) -> None:
        self.companions: dict[str, Any] = {}
        self.ordinal = len(self.peers)
        self.due = False
        self._holding: list[tuple[int, Message, list[int]]] | None = None
        self.peers[self.name] = self

    @property
    def node(self) -> str:
        """See `NodeHost.node`."""
        return self.name

    def ride(self, companion: Companion) -> None:
        """Add a companion, and start it."""
        self.companions[companion.prefix] = companion
        companion.start(self)

    # what companions call

    def tell(self, node: str, message: Message) -> None:
        """See `NodeHost.tell`."""
        text, prefix = json.dumps(message), str(message["kind"]).partition(".")[0]
        if self.losing[1] is not None and self.losing[1].random() < self.losing[0]:
            return

        def deliver() -> None:
            there = self.peers.get(node)
            if there is not None and there.alive:
                there.companions[prefix].on_node_message(self.name, json.loads(text))

        self.net.put((self.name, node, "agents"), deliver)

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`; while a roster is entered it waits behind the assignment."""
        if self._holding is not None:
            self._holding.append((rank, message, [os.dup(fd) for fd in fds]))
            return
        hear = self.workers.get(rank)
        if hear is None:
            return
        mine = [os.dup(fd) for fd in fds]

        def deliver() -> None:
            if self.workers.get(rank) is hear:
                hear(message, mine)
            else:
                _close(mine)

        self.net.put((self.name, f"rank {rank}", "down"), deliver)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`."""
        if self.spawns is None:
            raise NotImplementedError(f"{name}: there is no zygote here to fork {entry} from")
        return self.spawns(self, name, arguments)

    def emit(self, event: Event) -> None:
        """See `Host.emit`."""
        self.events.append(event)

    def later(self, delay_s: float) -> None:
        """See `Host.later`: ticks come when they are made."""
        del delay_s
        self.due = True

    def recheck(self) -> None:
        """See `Host.recheck`."""

    # what the agent does

    def tick(self) -> None:
        """Let its companions know that time has passed."""
        self.due = False
        for companion in self.companions.values():
            companion.on_tick(self.clock.now())

    def nodes(self, names: Sequence[str]) -> None:
        """Say who is here."""
        for companion in self.companions.values():
            companion.on_nodes({name: self.address or f"address-of-{name}" for name in names})

    def stop(self, generation: int) -> None:
        """Nothing of a generation writes here any more."""
        for companion in self.companions.values():
            companion.on_stopped(generation)

    def enter(self, roster: Roster, told: Callable[[int, Mapping[str, Message]], None]) -> None:
        """Enter a roster; `told` hears what each rank that stands here is assigned."""
        self.world_size = roster.world_size
        self._holding = []
        assigned: dict[int, dict[str, Message]] = {m.rank: {} for m in roster.members if m.node == self.name}
        for prefix, companion in self.companions.items():
            for rank, message in companion.on_roster(roster).items():
                if rank in assigned:
                    assigned[rank][prefix] = message
        for rank, message in assigned.items():
            told(rank, message)
        held, self._holding = self._holding, None
        for rank, message, fds in held:
            self.send(rank, message, fds)
            _close(fds)

    def hear(self, rank: int, message: Message) -> None:
        """A worker of this node says something; it is heard later."""
        speaker = self.workers.get(rank)
        text, prefix = json.dumps(message), str(message["kind"]).partition(".")[0]

        def deliver() -> None:
            if self.alive and self.workers.get(rank) is speaker and prefix in self.companions:
                self.companions[prefix].on_message(rank, json.loads(text), ())

        self.net.put((f"rank {rank}", self.name, "up"), deliver)

    def close(self) -> None:
        """The agent is gone, with all that it held."""
        self.alive = False
        self.net.cut(self.name)
        for companion in self.companions.values():
            companion.close()

    def notices(self) -> list[str]:
        """Return the sentences that an operator would have seen."""
        return [event.text for event in self.events if isinstance(event, Notice)]

    def tiers(self, what: str, tier: str = "peer") -> list[int]:
        """Return the steps of what became of saves."""
        return [e.step for e in self.events if isinstance(e, TierEvent) and e.tier == tier and e.what == what]


def roster(generation: int, homes: Mapping[int, str]) -> Roster:
    """Return a roster whose ranks stand on these nodes."""
    members = tuple(
        Member(rank, Incarnation(node, 100 * (generation + 1) + rank, 1), node, rank, False, "kept")
        for rank, node in sorted(homes.items())
    )
    return Roster(0, generation, members)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
