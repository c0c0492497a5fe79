"""The live display as it rides on the agent: workers say how far they are, the display shows it."""

from collections.abc import Mapping, Sequence

from everstep.goodput.progress import Progress
from everstep.recovery.api import Child, Host, Message
from everstep.recovery.core.words import Roster


class ProgressCompanion:
    """Companion `progress`: feeds `Progress` and gives it the agent's ticks."""

    prefix = "progress"

    def __init__(self, display: Progress) -> None:
        self._display = display

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._clock = host.clock

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""
        del rank, fds
        loss = message["values"].get("loss")
        self._display.progress(message["step"], message["total"], loss, self._clock.now())

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`."""

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        del roster
        return {}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""
        self._display.tick(now)

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`."""
        del completed
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()

    def close(self) -> None:
        """See `Companion.close`."""
        self._display.close(self._clock.now())
