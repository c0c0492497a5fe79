"""The live display as it rides on the agent: workers say how far they are, the display shows it.

rank 0 ─▶ progress.begun {step, total}              its loop begins after `step`
rank 0 ─▶ progress.step {step, seconds, values}     a few times a second
all    ─▶ progress.new {step, at_s}                 the first new step after a fault was done at that monotonic time
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from everstep.goodput.progress import Progress
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core.words import Roster


class ProgressCompanion:
    """Companion `progress`: feeds `Progress` and gives it the agent's ticks."""

    prefix = "progress"

    def __init__(self, display: Progress) -> None:
        self._display = display

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._clock, self._host = host.clock, host

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""
        del fds
        now = self._clock.now()
        match message["kind"]:
            case "progress.begun":
                self._display.begun(message["step"], message["total"], now)
            case "progress.step":
                self._display.progress(message["step"], message["values"].get("loss"), message["seconds"], now)
            case "progress.new":
                self._display.came(rank, message["step"], message["at_s"])
            case _:
                return

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`."""

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`: each rank shall say when it has done the first new step."""
        nodes = Counter(member.node for member in roster.members)
        if len(nodes) > 1:  # the ranks of this node alone are heard here
            host: NodeHost = self._host  # type: ignore[assignment]  # there are several
            self._display.heard_of = nodes[host.node]
        new = self._display.awaited
        return {} if new is None else {member.rank: {"new": new} for member in roster.members}

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
