"""What rides on a watcher: a feature of a layer above, known by name, and what it is offered without an agent.

The feature has its own rank's worker only; whatever it must know of the others' comes as their words (`PeerCompanion`).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.events import Event, Notice
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Message, PeerCompanion
from everstep.recovery.core.words import Roster
from everstep.telemetry import say


class Riding:
    """Implements `recovery.api.Host` for one rank. Without a rider it does nothing."""

    def __init__(self, loop: Loop, send: Callable[[Message, Sequence[int]], None]) -> None:
        self._loop, self.clock = loop, loop.clock
        self._send = send
        self._rider: PeerCompanion | None = None
        self._rank = -1
        self.world_size = 1
        self.run_dir = ""

    def start(self, named: Sequence[Any] | None, world_size: int) -> None:
        """Make the rider: `module:function`, and what it is called with."""
        self.world_size = world_size
        if named is not None:
            module, _, function = named[0].partition(":")
            rider: PeerCompanion = getattr(importlib.import_module(module), function)(named[1])
            rider.start(self)
            self._rider = rider

    def said(self, prefix: str, message: Message) -> None:
        """The worker says something that is not of the world's words."""
        if self._rider is not None and prefix == self._rider.prefix:
            self._rider.on_message(self._rank, message, ())

    def left(self, generation: int) -> Message:
        """Our worker has left `generation`: return what the others are told with its arrival."""
        if self._rider is None:
            return {}
        self._rider.on_stopped(generation)
        return self._rider.telling()

    def told(self, rank: int, message: Message) -> None:
        """The watcher of `rank` has told this."""
        if self._rider is not None:
            self._rider.told(rank, message)

    def enter(self, roster: Roster, rank: int) -> Mapping[str, Message]:
        """Return what our worker is told with its assignment, by prefix."""
        self._rank, self.world_size = rank, roster.world_size
        return {} if self._rider is None else {self._rider.prefix: self._rider.on_roster(roster)[rank]}

    def close(self) -> None:
        """The job is over."""
        rider, self._rider = self._rider, None
        if rider is not None:
            rider.close()

    # -- Host ----------------------------------------------------------------------------------------------------

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`: to our own worker; there is no way to another's."""
        if rank == self._rank:
            self._send(message, fds)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`: a watcher has no zygote."""
        raise NotImplementedError(f"{name}: a watcher has no zygote to fork {entry} from")

    def emit(self, event: Event) -> None:
        """See `Host.emit`: there is no ledger; what people should read is said once for all ranks, errors by each."""
        if isinstance(event, Notice) and (self._rank == 0 or event.level == "error"):
            say(event.text)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""
        self._loop.later(delay_s, self._tick)

    def recheck(self) -> None:
        """See `Host.recheck`: nothing is waited for."""

    def _tick(self) -> None:
        if self._rider is not None:
            self._rider.on_tick(self.clock.now())
