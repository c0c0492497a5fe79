"""An agent and its workers in one process, for the memory tier: a Host that hands messages straight on.

Descriptors are duplicated as a link would do, so that each side closes its own.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.clock import SYSTEM, Clock
from everstep.events import Event, Notice
from everstep.recovery.api import Child, Companion, Message
from everstep.recovery.core.words import Incarnation, Member, Roster

Receiver = Callable[[Message, Sequence[int]], None]


class LoopbackHost:
    """What the agent offers its companions, without a process: messages arrive at once, ticks on request."""

    def __init__(self, companion: Companion, world_size: int = 1, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.world_size = world_size
        self.run_dir = ""
        self.events: list[Event] = []
        self.receivers: dict[int, Receiver] = {}
        self.generation = -1
        self._companion = companion
        self._due = False
        companion.start(self)

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        if rank in self.receivers:
            self.receivers[rank](message, [os.dup(fd) for fd in fds])

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`: there is no zygote here."""
        raise NotImplementedError(f"{name}: a loopback host has no zygote to fork {entry} from; use a real agent")

    def emit(self, event: Event) -> None:
        """See `Host.emit`."""
        self.events.append(event)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""
        self._due = True

    def recheck(self) -> None:
        """See `Host.recheck`."""

    def from_worker(self, rank: int) -> Callable[[Message], None]:
        """Return what a worker of that rank sends with."""

        def send(message: Message) -> None:
            self._companion.on_message(rank, message, ())
            self.settle()

        return send

    def settle(self) -> None:
        """Tick until nothing is due any more."""
        while self._due:
            self._due = False
            self._companion.on_tick(self.clock.now())

    def enter(self, world_size: int | None = None) -> Mapping[int, Message]:
        """End the present generation and enter the next; return what each rank is told."""
        self.world_size = world_size or self.world_size
        if self.generation >= 0:
            self._companion.on_stopped(self.generation)
        self.generation += 1
        members = tuple(
            Member(rank, Incarnation("loopback", 100 + rank, 1), "node", rank, False, "kept")
            for rank in range(self.world_size)
        )
        return self._companion.on_roster(Roster(0, self.generation, members))

    def notices(self) -> list[str]:
        """Return the sentences that an operator would have seen."""
        return [event.text for event in self.events if isinstance(event, Notice)]
