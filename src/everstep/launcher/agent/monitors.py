"""What scripts ask of their launcher by way of their rank monitors: an end without a restart, an end of this node.

Rule 1: a request is heard while the job runs, within a look, and not only at the next restart; the last one of a
        process is heard before its end.
Rule 2: who asks for the end of the job may first end what it is about (a flag file, a last line of a log): until its
        process has ended, for `LEAVE_S` at most.
"""

from collections.abc import Callable
from typing import Protocol

from everstep.errors import ExitCode
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.worker import Worker
from everstep.launcher.nodes.api import Nodes
from everstep.process.loop import Loop
from everstep.process.monitor import Request
from everstep.recovery.core import words

LEAVE_S = 2.0
CONTINUE, EXCLUDE, SHUTDOWN = range(3)
"""NVRx's numbers of its `WorkloadAction`."""


class Owner(Protocol):
    """As much of the agent as is used here."""

    loop: Loop
    crew: Crew
    nodes: Nodes

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


class Monitors:
    """Hears requests of one agent's workers; all on the loop's thread."""

    def __init__(self, agent: Owner) -> None:
        self._agent = agent
        self._leaving: dict[Worker, Callable[[], None]] = {}

    def look(self) -> None:
        """Look at every rank's page; to be called about five times a second."""
        for worker in self._agent.crew.ranks.values():
            self._hear(worker)

    def gone(self, worker: Worker) -> None:
        """A process has ended: what it asked for last is heard, and what waited for its end is done."""
        self._hear(worker)
        done = self._leaving.pop(worker, None)
        if done is not None:
            done()

    def _hear(self, worker: Worker) -> None:
        request = worker.requested
        if request is None or request.number == worker.asked_for:
            return
        worker.asked_for = request.number
        who = f"rank {worker.rank}"
        self._agent.notice(f"{who} asks for {_NAMES.get(request.action, request.action)}: {request.text}", "warning")
        if request.action == SHUTDOWN:
            self._when_it_has_left(worker, lambda: self._shut_down(who, request))
        elif request.action == EXCLUDE:
            self._when_it_has_left(worker, lambda: self._exclude(who, request))

    def _when_it_has_left(self, worker: Worker, then: Callable[[], None]) -> None:
        self._leaving[worker] = then
        self._agent.loop.later(LEAVE_S, lambda: self._leaving.pop(worker, _nothing)())

    def _shut_down(self, who: str, request: Request) -> None:
        text = f"{who} has asked for the end of the job, without a restart: {request.text}"
        self._agent.nodes.say(words.EndRequested(int(ExitCode.DO_NOT_REQUEUE), text))

    def _exclude(self, who: str, request: Request) -> None:
        self._agent.nodes.exclude(f"{who} has asked that this node be left out: {request.text}")


_NAMES = {CONTINUE: "nothing", EXCLUDE: "the exclusion of this node", SHUTDOWN: "the end of the job"}


def _nothing() -> None:
    return
