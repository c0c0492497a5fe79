"""Says live that a run's losses have become incomparable with those of a run without faults.

all ─▶ numerics.here {facts}        what this rank's sums depend on, as its loop begins
"""

from collections.abc import Mapping, Sequence

from everstep.events import Notice
from everstep.goodput.core.comparable import Comparison, verdict
from everstep.recovery.api import Child, Host, Message
from everstep.recovery.core.words import Roster


class ComparisonCompanion:
    """Companion `numerics`: compares what ranks say with what they said when the run began."""

    prefix = "numerics"

    def __init__(self) -> None:
        self._comparison = Comparison()
        self._nodes: dict[int, str] = {}

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host = host

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""
        del fds
        facts = {str(name): str(value) for name, value in message["facts"].items()}
        found = self._comparison.hear(rank, self._host.world_size, self._nodes.get(rank, ""), facts)
        if found:
            self._host.emit(Notice(text=verdict(found), level="warning"))

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`."""

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        self._nodes = {member.rank: member.node for member in roster.members}
        return {}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`."""
        del completed
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()

    def close(self) -> None:
        """See `Companion.close`."""
