"""A job of one node: whatever is said has been heard, and no socket is opened for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.errors import ExitCode
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.examine import Examiner
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.stores import Stores
from everstep.launcher.agent.watch import Watch
from everstep.launcher.agent.worker import Worker
from everstep.launcher.config import LaunchConfig
from everstep.launcher.core.limits import Verdict
from everstep.launcher.nodes.api import Address
from everstep.process.loop import Loop
from everstep.recovery.api import Message
from everstep.recovery.core import words
from everstep.recovery.core.world import World
from everstep.telemetry import Telemetry

NAME, ADDRESS = "node-0", "127.0.0.1"


class Agent(Protocol):
    """As much of the agent as is used here, and by `together`."""

    config: LaunchConfig
    loop: Loop
    nursery: Nursery
    crew: Crew
    host: AgentHost
    watch: Watch
    examiner: Examiner
    stores: Stores
    telemetry: Telemetry
    world: World
    roster: words.Roster | None
    ending: Any

    def tell(self, event: words.Event) -> None:
        """Hand one event to the world machine."""
        ...

    def end(self, command: words.End) -> None:
        """The job is over."""
        ...

    def condemned(self, worker: Worker, verdict: Verdict, evidence: str) -> None:
        """A rank hangs, and this is where it stands."""
        ...

    def signalled(self, number: int) -> None:
        """Pass a signal on to the workers."""
        ...

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


class Single:
    """Implements `nodes.api.Nodes` without anybody else."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.name, self.number = NAME, 0
        self.cut_off = False
        self._publishing: words.Roster | None = None  # waits for a store
        self._storeless = False

    @property
    def present(self) -> Mapping[str, str]:
        """See `Nodes.present`."""
        return {NAME: ADDRESS}

    def begin(self) -> None:
        """See `Nodes.begin`."""
        self._agent.stores.start()

    def say(self, event: words.Event) -> None:
        """See `Nodes.say`: at once."""
        self._agent.tell(event)

    def tell(self, node: str, prefix: str, message: Message) -> None:
        """See `Nodes.tell`: in a later turn of the loop, as from another node."""
        if node == self.name:
            self._agent.loop.later(0.0, lambda: self._agent.host.node_message(node, prefix, message))

    # -- rosters and their store ---------------------------------------------------------------------------------

    def publish(self, roster: words.Roster) -> None:
        """A roster is known with the store its members meet on, and not before: until then deaths are still heard."""
        stores, agent = self._agent.stores, self._agent
        if roster.members and agent.roster is not None and not agent.config.wrapped and self._publishing is None:
            stores.renew()  # torch's own rendezvous wants a new store for every start (E12)
        if roster.members and stores.address is None:
            self._publishing = roster
            if self._storeless:
                self._storeless = False
                stores.renew()
            return
        self._publishing = None
        agent.tell(words.Published(roster))

    def store_of(self, roster: words.Roster) -> Address:
        """See `Nodes.store_of`."""
        del roster
        assert self._agent.stores.address is not None, "no loop turns between a roster's publication and its entry"
        return self._agent.stores.address

    def store_changed(self) -> None:
        """See `Nodes.store_changed`."""
        if self._publishing is not None and self._agent.stores.address is not None:
            self.publish(self._publishing)

    def store_failed(self, code: int, text: str) -> None:
        """No store: nothing to those who run; it is tried once more when a generation needs one."""
        if self._agent.roster is None or self._publishing is not None:
            self._agent.end(words.End(code, text))
            return
        self._storeless = True
        self._agent.notice(f"{text}; it is tried again at the next fault", "error")

    # -- what is the same without others -------------------------------------------------------------------------

    def entered(self) -> None:
        """See `Nodes.entered`."""

    def follow(self) -> None:
        """See `Nodes.follow`."""

    def drained(self, generation: int) -> None:
        """See `Nodes.drained`."""
        self._agent.tell(words.Drained(generation))

    def look(self, now: float) -> None:
        """See `Nodes.look`."""

    def judge(self, now: float) -> None:
        """See `Nodes.judge`."""
        agent = self._agent
        watched = {r: w for r, w in agent.crew.ranks.items() if not w.done and w.last is None}
        verdicts = agent.watch.look(watched, now)
        for event in agent.watch.news():
            agent.telemetry.emit(event)
        for rank, worker in watched.items():
            (agent.examiner.near if rank in agent.watch.near else agent.examiner.far)(worker)
        for verdict in verdicts:
            agent.examiner.conclude(watched[verdict.rank], verdict, agent.condemned)

    def ending(self, command: words.End) -> None:
        """See `Nodes.ending`."""

    def exclude(self, text: str) -> None:
        """See `Nodes.exclude`: there is no other node, so the job ends and the scheduler may replace this one."""
        self.say(words.EndRequested(int(ExitCode.BAD_NODE), f"{text}; the job has no other node"))

    def leave(self, why: str, then: Callable[[str], None]) -> None:
        """See `Nodes.leave`."""
        then("the job has no other node; end it with everstep drain, or everstep kill --job")

    def faulted(self, fault: words.Fault, now: float) -> None:
        """See `Nodes.faulted`: there is no other node."""

    def problems(self) -> Sequence[str]:
        """See `Nodes.problems`."""
        return ()

    def close(self) -> None:
        """See `Nodes.close`."""
