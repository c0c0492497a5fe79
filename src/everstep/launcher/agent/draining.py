"""A job that is asked to end, by a signal or an operator: its step ends, and its state is made durable first.

Rides on the agent as a companion, so that ranks and the agents of other nodes reach it; what it decides about steps is
`recovery.core.draining`'s.

    rank ◀─ drain.stand {generation}, drain.until {generation, step}
    rank ─▶ drain.stands {generation, begun}, drain.left {generation, step}
    node ─▶ all nodes  begin {number, why}, stands {generation, begun}, left {generation, step}, done {step}

Rule 1: all of it fits into the grace time, counted from the signal: half of it for the step that runs, what is left for
        the write. Whoever is not through by then is killed.
Rule 2: ranks that have not come to the end of their step in their half, a fault, or a generation that is just being
        left: workers are ended, and what memory holds whole is saved. That is the step before.
Rule 3: a worker whose call knows no steps gets the signal itself, as under torchrun.
Rule 4: 128 + the signal says that nothing that was done is lost; 1, that something is. The words say what.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from everstep.clock import Clock
from everstep.errors import ExitCode
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.ending import AGAIN_S, Ending
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.worker import Worker
from everstep.launcher.config import LaunchConfig
from everstep.launcher.nodes.api import Nodes
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core import words
from everstep.recovery.core.draining import Agreement
from everstep.recovery.core.words import Roster
from everstep.recovery.core.world import Phase, World

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
"""Those after which a job ends in order. SIGUSR1 is Slurm's word that time is nearly up: as SIGTERM."""
HEARD = (*sorted(SIGNALS), signal.SIGQUIT)
"""SIGQUIT ends it at once."""
FOR_THE_STEP = 0.5
"""This share of the grace time."""
_GOES_ON = (Phase.RUNNING, Phase.DRAINING, Phase.FINISHING, Phase.ENDED)


class Owner(Protocol):
    """As much of the agent as is used here."""

    config: LaunchConfig
    loop: Loop
    crew: Crew
    host: AgentHost
    nodes: Nodes
    world: World
    roster: words.Roster | None
    ending: Ending | None

    def signalled(self, number: int) -> None:
        """Pass a signal on to the workers."""
        ...

    def end(self, command: words.End) -> None:
        """The job is over."""
        ...

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


class Draining:
    """Implements `recovery.api.NodeCompanion`. All calls come on the agent's thread."""

    prefix = "drain"

    def __init__(self, agent: Owner) -> None:
        self._agent = agent
        self._clock: Clock = agent.loop.clock
        self._host: Host | None = None
        self._number = 0
        self._due_s = 0.0
        self._agreement: Agreement | None = None
        self._step: int | None = None  # the last one that ranks shall do
        self._left = False  # a rank has left between two steps
        self._why = ""
        self._done_there: dict[str, int] = {}  # the last step done by the ranks of another node, when it ended

    @property
    def begun(self) -> bool:
        """The end was asked for."""
        return self._number != 0

    @property
    def left_s(self) -> float:
        """What is left of the grace time; all of it where no end was asked for."""
        return max(0.0, self._due_s - self._clock.now()) if self.begun else self._agent.config.grace_s

    def kills(self, worker: Worker) -> bool:
        """Whether the end kills a worker at once, because its state lies in memory; others get the signal."""
        return self.begun and worker.attached and worker.drains and worker.look().step > 0

    # -- from the first word to the end ------------------------------------------------------------------------------

    def begin(self, number: int, why: str) -> None:
        """Ask the job to end in order, on all nodes. `number`: as if by this signal; it makes the exit code.

        `why`: who asks, as "SIGTERM from outside". Once is enough; what comes after the first is void.
        """
        if self.begun or self._agent.ending is not None:
            return
        grace_s = self._agent.config.grace_s
        self._number = int(signal.SIGTERM) if number == signal.SIGUSR1 else number
        self._why, self._due_s = why, self._clock.now() + grace_s
        for node in self._others:
            self._tell(node, "begin", number=number, why=why)
        self._agent.loop.later(grace_s, self._too_late)
        self._agent.loop.later(grace_s * FOR_THE_STEP, self._step_too_long)
        self._ask()

    def again(self, name: str) -> None:
        """Another signal: whoever sends it does not want to wait."""
        grace_s = self._agent.config.grace_s
        if self._clock.now() - (self._due_s - grace_s) > AGAIN_S:
            self._agent.end(words.End(self._code, f"ended by {self._why}"))
            assert self._agent.ending is not None
            self._agent.ending.hurry(name)

    def follow(self) -> None:
        """The world machine has moved: a fault leaves no time for another generation."""
        view = self._agent.world
        if self.begun and self._agent.ending is None and not self._on_its_way(view):
            cause = view.causes[-1].kind if view.causes else "fault"
            self._conclude(f"a {cause} came before all ranks had ended their step")

    def _ask(self) -> None:
        agent, view = self._agent, self._agent.world
        if view.phase is not Phase.RUNNING:
            if not self._on_its_way(view):
                self._conclude("no generation runs")
            return
        if not all(worker.attached and worker.drains and worker.last is None for worker in agent.crew.ranks.values()):
            self._conclude("")
            return
        assert agent.roster is not None
        grace_s = agent.config.grace_s
        agent.notice(f"{self._why}: the step that runs ends, and what is done is made durable, within {grace_s:g} s")
        at_work = {member.node for member in agent.roster.members}  # a node that waits for ranks keeps nobody waiting
        self._agreement = Agreement(at_work, agent.crew.ranks)
        for rank in agent.crew.ranks:
            self._say(rank, "stand")

    @staticmethod
    def _on_its_way(view: World) -> bool:
        """Ranks run their step, or all have come to their end."""
        return view.phase in _GOES_ON or (bool(view.ranks) and all(view.has_completed(who) for who in view.ranks))

    def _step_too_long(self) -> None:
        if self._agent.ending is None and self._agent.world.phase is Phase.RUNNING:
            self._conclude(f"a step did not end within {self._agent.config.grace_s * FOR_THE_STEP:g} s")

    def _too_late(self) -> None:
        if self._agent.ending is None:
            self._conclude("")

    def _conclude(self, why: str) -> None:
        """End the workers now; what memory holds whole is saved when they are gone."""
        if why and self._agent.crew.step() is not None:
            self._agent.notice(f"{why}: what memory holds whole is saved, the step that ran is not", "warning")
        self._agent.signalled(self._number)
        self._agent.nodes.say(words.EndRequested(self._code, f"ended by {self._why}"))

    @property
    def _code(self) -> int:
        return int(ExitCode.SIGNALLED) + self._number

    # -- the end -----------------------------------------------------------------------------------------------------

    def ends(self, command: words.End) -> words.End:
        """The end is decided: return how it is told. A job whose ranks have left between two steps is not done."""
        step = self._agent.crew.step()
        if self.begun and step is not None:
            for node in self._others:
                self._tell(node, "done", step=step)
        if command.code == 0 and self._left:
            return words.End(self._code, f"ended by {self._why} after step {self._step}")
        return command

    def verdict(self, code: int, reason: str) -> tuple[int, str]:
        """Return the exit code, and what was and was not made durable. Asked when all is over."""
        if code < ExitCode.SIGNALLED:
            return code, reason
        done = self._done()
        durable = self._agent.host.durable()
        if done is None:
            known = any(worker.drains for worker in self._agent.crew.ranks.values())
            return code, f"{reason}. No step was done" if known else reason
        if durable is None:
            return code, f"{reason}. Step {done} was done, and nothing was written: --checkpoint-dir is not given"
        if durable >= done:
            text = f"{reason}. The checkpoint of step {durable} is durable: the next start goes on from there"
        elif durable:
            text = f"{reason}. Step {done} was done, and the newest durable checkpoint is of step {durable}"
        else:
            text = f"{reason}. Step {done} was done, and no checkpoint is durable"
        return (code if durable >= done else int(ExitCode.FAILED)), text

    def _done(self) -> int | None:
        """The last step done by all ranks, as far as it is known."""
        told = [cause.step for cause in self._agent.world.causes[-1:]] + [self._agent.crew.step()]
        here = max((step for step in told if step is not None), default=None)
        return None if here is None else min([here, *self._done_there.values()])

    # -- what ranks and nodes say --------------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host = host

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`: what is lost with a node is a fault, and heard as one."""

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""
        for fd in fds:
            os.close(fd)
        if int(message["generation"]) != self._generation:
            return
        if message["kind"] == "drain.left":
            self._leaves(int(message["step"]))
        elif message["kind"] == "drain.stands" and self._agreement is not None:
            newest = self._agreement.rank_stands(rank, int(message["begun"]))
            if newest is not None:
                self._stands(newest)

    def _leaves(self, step: int) -> None:
        """A rank has left between two steps: told to all before it is known that it has completed."""
        if not self._left:
            for node in self._others:
                self._tell(node, "left", generation=self._generation, step=step)
        self._left, self._step = True, step if self._step is None else self._step

    def _stands(self, begun: int) -> None:
        for node in self._others:
            self._tell(node, "stands", generation=self._generation, begun=begun)
        self._node_stands(self._agent.nodes.name, begun)

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`."""
        match str(message["kind"]).partition(".")[2]:
            case "begin" if message["number"] in SIGNALS:
                self.begin(int(message["number"]), str(message["why"]))
            case "done":
                self._done_there[node] = int(message["step"])
            case "left" if self.begun and int(message["generation"]) == self._generation:
                self._left, self._step = True, int(message["step"]) if self._step is None else self._step
            case "stands" if int(message["generation"]) == self._generation:
                self._node_stands(node, int(message["begun"]))
            case _:
                return

    def _node_stands(self, node: str, begun: int) -> None:
        if self._agreement is None or self._step is not None:
            return
        self._agreement.node_stands(node, begun)
        step = self._step = self._agreement.step
        if step is not None:
            for rank in self._agent.crew.ranks:
                self._say(rank, "until", step=step)

    @property
    def _generation(self) -> int:
        return -1 if self._agent.roster is None else self._agent.roster.generation

    @property
    def _others(self) -> list[str]:
        return [node for node in self._agent.nodes.present if node != self._agent.nodes.name]

    def _say(self, rank: int, verb: str, **body: Any) -> None:
        self._given.send(rank, {"kind": f"{self.prefix}.{verb}", "generation": self._generation, **body})

    def _tell(self, node: str, verb: str, **body: Any) -> None:
        cast(NodeHost, self._given).tell(node, {"kind": f"{self.prefix}.{verb}", **body})

    @property
    def _given(self) -> Host:
        assert self._host is not None, "start() comes first"
        return self._host

    # -- nothing of its own is outstanding ---------------------------------------------------------------------------

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`: it has none."""

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

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`."""
        del completed
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()

    def close(self) -> None:
        """See `Companion.close`."""
