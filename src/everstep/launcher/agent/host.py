"""What the agent offers its companions, and how it hands them what is theirs."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from everstep.clock import Clock
from everstep.events import Event, Notice
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.worker import Worker
from everstep.launcher.config import LaunchConfig
from everstep.launcher.nodes.api import Nodes
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Companion, Message
from everstep.recovery.core import words
from everstep.telemetry import Telemetry


class Owner(Protocol):
    """As much of the agent as is used here."""

    config: LaunchConfig
    loop: Loop
    nursery: Nursery
    telemetry: Telemetry
    run_dir: Path
    crew: Crew
    nodes: Nodes

    def recheck(self) -> None:
        """What was outstanding may be done."""
        ...


class AgentHost:
    """Hands companions what is theirs, and does what they ask."""

    def __init__(self, agent: Owner, companions: Sequence[Companion]) -> None:
        self._agent = agent
        self._companions = {c.prefix: c for c in companions}
        self._begun: list[Companion] = []
        self._closed = False
        self._holding: list[tuple[int, Message, list[int]]] | None = None
        self.clock: Clock = agent.loop.clock
        self.world_size: int = agent.config.world_size  # of the present roster
        self.run_dir: str = str(agent.run_dir)

    # what companions call

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `recovery.api.Host.send`. While a roster is being entered, messages wait behind the assignment."""
        if self._holding is not None:
            self._holding.append((rank, message, [os.dup(fd) for fd in fds]))
            return
        worker = self._agent.crew.ranks.get(rank)
        if worker is not None:
            worker.process.send(message, fds)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any], owner: Companion) -> Child:
        """Fork a helper whose words and end come to `owner`."""
        order = {"role": "helper", "entry": entry, "arguments": dict(arguments)}
        return self._agent.nursery.order(name, order, owner.on_child_message, self._unless_closed(owner.on_child_exit))

    def _unless_closed(self, call: Callable[[Child, int], None]) -> Callable[[Child, int], None]:
        def hear(child: Child, status: int) -> None:
            if not self._closed:
                call(child, status)

        return hear

    def emit(self, event: Event) -> None:
        """See `recovery.api.Host.emit`."""
        self._agent.telemetry.emit(event)

    def later(self, delay_s: float) -> None:
        """See `recovery.api.Host.later`."""
        self._agent.loop.later(delay_s, lambda: self.tick(self.clock.now()))

    def recheck(self) -> None:
        """See `recovery.api.Host.recheck`."""
        self._agent.recheck()

    @property
    def node(self) -> str:
        """See `recovery.api.NodeHost.node`."""
        return self._agent.nodes.name

    @property
    def ordinal(self) -> int:
        """See `recovery.api.NodeHost.ordinal`."""
        return self._agent.nodes.number

    def tell(self, node: str, message: Message, owner: Companion) -> None:
        """See `recovery.api.NodeHost.tell`."""
        self._agent.nodes.tell(node, owner.prefix, message)

    # what the agent calls

    def start(self) -> None:
        """Start every companion; the first refusal ends the job. Only what was begun is closed."""
        for companion in self._companions.values():
            self._begun.append(companion)
            companion.start(OwnHost(self, companion))

    def message(self, worker: Worker, prefix: str, message: Message, fds: Sequence[int]) -> None:
        """A worker spoke; only a holder of a rank in the present roster is heard (P17)."""
        companion = self._companions.get(prefix)
        rank = worker.rank
        if companion is None or rank is None or self._agent.crew.ranks.get(rank) is not worker:
            for fd in fds:
                os.close(fd)
            return
        try:
            companion.on_message(rank, message, fds)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # it comes from the user's process: it may be anything
            text = f"rank {rank} said {message['kind']!r} in a form that is unknown here ({error!r}); it is not heard"
            self.emit(Notice(text=text, level="error"))

    def nodes(self, present: Mapping[str, str]) -> None:
        """Tell those that work with their like on other nodes who is here, by name with its address."""
        for companion in self._companions.values():
            hear = getattr(companion, "on_nodes", None)
            if hear is not None:
                hear(present)

    def node_message(self, node: str, prefix: str, message: Message) -> None:
        """The companion `prefix` on another node speaks."""
        hear = getattr(self._companions.get(prefix), "on_node_message", None)
        if hear is None or self._closed:
            return
        try:
            hear(node, message)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # it comes over a network
            text = f"{node} said {message.get('kind')!r} in a form that is unknown here ({error!r}); it is not heard"
            self.emit(Notice(text=text, level="error"))

    def telling(self) -> dict[str, Message]:
        """Collect what all nodes must know before the next roster; see `recovery.api.TellingCompanion`."""
        tells = ((prefix, getattr(c, "telling", None)) for prefix, c in self._companions.items())
        return {prefix: tell() for prefix, tell in tells if tell is not None}

    def told(self, node: str, message: Mapping[str, Message]) -> None:
        """Hand out what a node, this one too, has told before the next roster."""
        for prefix, told in message.items():
            hear = getattr(self._companions.get(prefix), "told", None)
            if hear is not None:
                hear(node, told)

    def shown(self) -> list[Message]:
        """Collect what an operator sees of companions; see `recovery.api.ShownCompanion`."""
        return [row for c in self._companions.values() if (show := getattr(c, "shown", None)) for row in show()]

    def stopped(self, generation: int) -> None:
        """Nothing of `generation` writes any more."""
        for companion in self._companions.values():
            companion.on_stopped(generation)

    def roster(self, roster: words.Roster) -> dict[int, dict[str, Message]]:
        """Collect what each rank shall be told; what is sent meanwhile waits for `release`."""
        self.world_size = roster.world_size
        self._holding = []
        told: dict[int, dict[str, Message]] = {m.rank: {} for m in roster.members}
        for prefix, companion in self._companions.items():
            for rank, message in companion.on_roster(roster).items():
                told[rank][prefix] = message  # those of other nodes are told by theirs
        return told

    def release(self) -> None:
        """The assignments are out: send what waited behind them."""
        held, self._holding = self._holding or [], None
        for rank, message, fds in held:
            self.send(rank, message, fds)
            for fd in fds:
                os.close(fd)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for companion in self._companions.values():
            companion.on_tick(now)

    def drained(self, *, completed: bool) -> bool:
        """True when no companion has anything outstanding."""
        return not [c for c in self._companions.values() if not c.drained(completed)]  # each is asked

    def durable(self) -> int | None:
        """The newest step that a start can go on from after everything here is gone; None where no tier keeps any."""
        steps = [tell() for c in self._companions.values() if (tell := getattr(c, "durable", None)) is not None]
        return max(steps, default=None)

    def problems(self) -> list[str]:
        """What must show in the exit status."""
        return [text for c in self._companions.values() for text in c.problems()]

    def close(self) -> None:
        """The job is over."""
        self._closed = True
        for companion in self._begun:
            companion.close()


class OwnHost:
    """Implements `recovery.api.NodeHost` for one companion: its children's words come to it."""

    def __init__(self, host: AgentHost, companion: Companion) -> None:
        self._host, self._owner = host, companion
        self.clock, self.run_dir = host.clock, host.run_dir

    @property
    def world_size(self) -> int:
        """See `recovery.api.Host.world_size`."""
        return self._host.world_size

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `recovery.api.Host.send`."""
        self._host.send(rank, message, fds)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `recovery.api.Host.spawn`."""
        return self._host.spawn(name, entry, arguments, self._owner)

    def emit(self, event: Event) -> None:
        """See `recovery.api.Host.emit`."""
        self._host.emit(event)

    def later(self, delay_s: float) -> None:
        """See `recovery.api.Host.later`."""
        self._host.later(delay_s)

    def recheck(self) -> None:
        """See `recovery.api.Host.recheck`."""
        self._host.recheck()

    @property
    def node(self) -> str:
        """See `recovery.api.NodeHost.node`."""
        return self._host.node

    @property
    def ordinal(self) -> int:
        """See `recovery.api.NodeHost.ordinal`."""
        return self._host.ordinal

    def tell(self, node: str, message: Message) -> None:
        """See `recovery.api.NodeHost.tell`."""
        self._host.tell(node, message, self._owner)
