"""A job of several nodes, as its agent sees it: what is said goes to all, what all have heard comes back.

Rule 1: each agent acts on the processes of its own node alone; the ranks of another end with its agent.
Rule 2: what companions keep is told before a roster (`kept`), when nobody here is in an earlier generation any more.
        The hub lets no roster be told before all nodes have said so: all companions answer from the same words.
Rule 3: a node that is gone is not waited for: a spare node takes its ranks, else spares elsewhere, else the world
        shrinks where it may, else the job ends (75). `LOST_NODE_S` is for spares that are just being born.
"""

import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from everstep.errors import ExitCode
from everstep.launcher import left_out
from everstep.launcher.agent.single import Agent
from everstep.launcher.agent.stores import STORE
from everstep.launcher.core.limits import Own, Verdict
from everstep.launcher.nodes.api import Address
from everstep.launcher.nodes.core.lemon import Lemon, spared
from everstep.launcher.nodes.membership import Membership
from everstep.ranks import brief
from everstep.recovery.api import Message
from everstep.recovery.core import words, world
from everstep.recovery.core.world import Phase

LOST_NODE_S = 10.0
VIEW_S = 1.0
STOP, GO = int(signal.SIGSTOP), int(signal.SIGCONT)


class Together:
    """Implements `nodes.api.Nodes`, and hears its `Membership`."""

    def __init__(self, agent: Agent, line: Membership) -> None:
        self._agent, self._line = agent, line
        self.name, self.number = line.name, line.number
        self._kept = -1
        self._started_store = self._storeless = False
        self._renewed = 0
        self._viewed_s = 0.0
        self._own: Own | None = None
        self.cut_off = False
        self._leaving = frozenset[str]()  # nodes that are left out, and may still be here
        config = agent.config
        self._wish: tuple[str, Callable[[str], None]] | None = None  # an operator's, that this node be left out
        self._lemon = Lemon(config.lemon_faults, config.lemon_window_s)
        self._asked_to_end = False  # here, by a signal that our workers have had

    @property
    def present(self) -> Mapping[str, str]:
        """See `Nodes.present`."""
        return self._line.present

    def begin(self) -> None:
        """See `Nodes.begin`."""
        self._line.begin(self)
        self._keep_store()
        self.follow()

    def welcomed(self, generation: int) -> None:
        """See `membership.Agent.welcomed`."""
        agent = self._agent
        agent.world = world.begin(self.name, agent.config.policy, generation=generation)
        agent.host.nodes(self.present)
        self._keep_store()
        agent.notice(f"{self.name} has come to a job that runs: it waits for ranks")

    def node_came(self, node: str, who: str) -> None:
        """See `membership.Agent.node_came`."""
        self._agent.notice(f"{node} ({who}) has come")
        self._agent.host.nodes(self.present)

    def say(self, event: words.Event) -> None:
        """See `Nodes.say`."""
        self._asked_to_end = self._asked_to_end or isinstance(event, words.EndRequested)
        if self._line.over:  # what still happens here is heard by nobody else
            self._agent.tell(event)
        else:
            self._line.say(event)

    def tell(self, node: str, prefix: str, message: Message) -> None:
        """See `Nodes.tell`."""
        self._line.tell(node, prefix, message)

    # -- rosters and their store ---------------------------------------------------------------------------------

    def _keep_store(self) -> None:
        """The first node that is here keeps the store; where it is lost, the next begins one."""
        if self._line.waits:
            return
        if self._line.keeps_store and not self._started_store and self._agent.ending is None:
            self._started_store = True
            self._agent.stores.start()

    def publish(self, roster: words.Roster) -> None:
        """See `Nodes.publish`. An unwrapped script begins on a new store every time (E12)."""
        agent = self._agent
        if roster.members and self._line.keeps_store:
            anew = agent.roster is not None and not agent.config.wrapped and self._renewed < roster.generation
            if anew or self._storeless:
                self._renewed, self._storeless = roster.generation, False
                agent.stores.renew()
        self._line.say(words.Published(roster))

    def store_of(self, roster: words.Roster) -> Address:
        """See `Nodes.store_of`."""
        return self._line.store_of(roster.generation)

    def store_changed(self) -> None:
        """See `Nodes.store_changed`."""
        found = self._agent.stores.address
        self._line.serves(None if found is None else (self.present[self.name], found[1]))

    def store_failed(self, code: int, text: str) -> None:
        """See `Nodes.store_failed`."""
        if self._agent.roster is None or self._agent.world.phase is Phase.PUBLISHING:
            self._agent.end(words.End(code, text))
            return
        self._storeless = True
        self._agent.notice(f"{text}; it is tried again at the next fault", "error")

    # -- what companions keep ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """See `Nodes.follow`: have all members here left their generation?"""
        view = self._agent.world
        if self._line.waits or view.phase not in (Phase.GATHERING, Phase.PUBLISHING) or self._kept >= view.generation:
            return
        if all(who in view.lost or who in view.here for who in view.own):
            self._kept = view.generation
            self._line.keeps(view.generation, self._agent.host.telling())

    def told(self, node: str, message: Mapping[str, Message]) -> None:
        """See `membership.Agent.told`."""
        self._agent.host.told(node, message)

    def from_node(self, node: str, prefix: str, message: Mapping[str, Any]) -> None:
        """See `membership.Agent.from_node`."""
        self._agent.host.node_message(node, prefix, message)

    def drained(self, generation: int) -> None:
        """See `Nodes.drained`."""
        self._line.drained(generation, self._agent.host.problems())

    def all_drained(self, generation: int) -> None:
        """See `membership.Agent.all_drained`."""
        self._agent.tell(words.Drained(generation))

    def problems(self) -> Sequence[str]:
        """See `Nodes.problems`."""
        return [f"{node}: {text}" for node, texts in sorted(self._line.problems.items()) for text in texts]

    # -- nodes ---------------------------------------------------------------------------------------------------

    def hear(self, event: words.Event) -> None:
        """See `membership.Agent.hear`."""
        if isinstance(event, words.EndRequested) and event.code > ExitCode.SIGNALLED and not self._asked_to_end:
            self._agent.signalled(event.code - ExitCode.SIGNALLED)  # as those of the node that it was sent to
        if isinstance(event, words.Faulted):
            self._agent.stores.suspect(event.fault.text)
        self._agent.tell(event)

    def nodes_changed(self, gone: str, why: str) -> None:
        """See `membership.Agent.nodes_changed`."""
        agent = self._agent
        if agent.ending is not None:
            return
        agent.notice(why, "error")
        agent.host.nodes(self.present)
        self._keep_store()
        if agent.world.roster is None and not self._begins_without(gone):
            agent.tell(words.EndRequested(int(ExitCode.BAD_NODE), f"{why}, before generation 0 began"))
            return
        self._bury(gone, why)

    def _begins_without(self, gone: str) -> bool:
        """Generation 0 has not begun: a spare node begins in its place, or fewer do. All decide alike."""
        world = self._agent.world
        shares = dict(world.policy.shares)
        if gone not in shares:
            return True
        share = shares.pop(gone)
        shares |= dict([(node, share) for node in self.present if node not in shares][:1])
        least, most = world.policy.min_world_size, world.policy.world_size
        if sum(shares.values()) < (most if least is None else least):
            return False
        policy = replace(world.policy, shares=tuple(sorted(shares.items())))
        self._agent.world = replace(world, policy=policy)
        return True

    def _bury(self, gone: str, why: str) -> None:
        """All that was there is dead."""
        agent, view = self._agent, self._agent.world
        lost = [m for m in view.members if m.node == gone and m.incarnation not in view.dead]
        spares = [who for who, standby in view.standbys.items() if standby.facts.node == gone]
        if lost:
            ranks = brief(m.rank for m in lost)
            text = f"{why}; {'rank' if len(lost) == 1 else 'ranks'} {ranks} ran there"
            first = lost[0]
            fault = words.Fault(
                view.roster.generation if view.roster else 0, "death", f"agent {self.name}", first.incarnation,
                first.rank, agent.crew.step(), text,
            )  # fmt: skip
            agent.tell(words.Faulted(fault))
            self._wait_for_nobody()
        whom = [*spares, *(m.incarnation for m in view.members if m.node == gone)]  # who is dead already, too
        for who in whom:  # with the last of them it is known that the node is gone: its ranks are given away together
            status = (
                0 if who in spares else words.UNKNOWN_STATUS
            )  # it was no fault of a spare's, which would be counted
            death = agent.world.death_of(who, status, agent.crew.step())
            agent.tell(replace(death, gone=gone if who is whom[-1] else ""))

    def _wait_for_nobody(self) -> None:
        """Until the next roster: no process is on its way to where the lost ones were."""
        agent = self._agent
        limit_s = agent.config.replacement_timeout_s
        if limit_s is None:
            known = replace(agent.world.policy, replace_deadline_s=LOST_NODE_S)
            agent.world = replace(agent.world, policy=known)

    def entered(self) -> None:
        """A roster has been entered: processes are awaited for as long as the operator said."""
        agent = self._agent
        usual = agent.config.policy.replace_deadline_s
        if agent.world.policy.replace_deadline_s == LOST_NODE_S != usual:
            agent.world = replace(agent.world, policy=replace(agent.world.policy, replace_deadline_s=usual))

    def hold(self, *, on: bool) -> None:
        """See `membership.Agent.hold`. Writers too; the store, which others use, writes nothing."""
        for process in list(self._agent.nursery.processes.values()):
            if process.name != STORE:
                process.signal(STOP if on else GO)
        text = "stand still until the other nodes are heard" if on else "go on: the other nodes are heard"
        self._agent.notice(f"{self.name} did not run for a while: its workers {text}", "warning")

    def cut(self, code: int, text: str) -> None:
        """See `membership.Agent.cut`. Once all is published as finished, only our own ranks' ends count."""
        agent = self._agent
        finished = agent.world.phase is Phase.FINISHING
        self.cut_off = not finished
        if agent.ending is not None:
            agent.ending.look()  # what it waits for does not count any more
            return
        if finished:
            others = [m.incarnation for m in agent.world.members if m.node != self.name]
            for who in others:
                agent.tell(words.Died(who, 0))
            return
        agent.end(words.End(code, text))

    def look(self, now: float) -> None:
        """See `Nodes.look`."""
        self._line.look(now)

    def ending(self, command: words.End) -> None:
        """See `Nodes.ending`: an end with an error is everybody's; that all went well each agent sees for itself."""
        if command.code != 0:
            self._line.say(words.EndRequested(command.code, command.reason))

    def faulted(self, fault: words.Fault, now: float) -> None:
        """See `Nodes.faulted`: each node counts its own, and wishes to leave when it is enough."""
        holders = {member.rank: member.node for member in self._agent.world.members}
        if fault.rank is None or holders.get(fault.rank) != self.name or self.name in self._leaving:
            return
        if self._lemon.fault(fault.generation, now):
            self._line.leaves()

    def leave(self, why: str, then: Callable[[str], None]) -> None:
        """See `Nodes.leave`: judged as a bad node's own wish is."""
        if self._wish is not None or self.name in self._leaving or self._line.over:
            then(f"{self.name} is being left out already, or is cut off")
            return
        self._wish = why, then
        self._line.leaves()

    def node_leaves(self, node: str) -> None:
        """See `membership.Agent.node_leaves`: wishes are judged in the one order of all facts, so alike everywhere."""
        policy = self._agent.world.policy
        least = policy.world_size if policy.min_world_size is None else policy.min_world_size
        share = policy.local_world_size or 1
        leaving = self._leaving & self.present.keys()
        if node in leaving or node not in self.present:
            return
        if not spared(len(self.present), len(leaving), least, share):
            if node == self.name:
                self._stays()
            return
        self._leaving = leaving | {node}
        if node == self.name:
            why = f"{self._lemon} (--lemon-faults)"
            if self._wish is not None:
                why, then = self._wish
                then("")
            self.exclude(f"{node} is left out: {why}")

    def _stays(self) -> None:
        """Too few would be left."""
        if self._wish is None:
            self._agent.notice(f"{self.name} has had {self._lemon}: it stays, for too few would be left", "warning")
            return
        (_, then), self._wish = self._wish, None
        then(
            f"too few would be left without {self.name}: start the job with --nnodes MIN:MAX, --spare-nodes or "
            "--min-world-size, or end it with everstep drain"
        )

    def exclude(self, text: str) -> None:
        """See `Nodes.exclude`: for the others this node is lost, once all that ran here has ended."""
        config, host = self._agent.config, socket.gethostname()
        if config.base_dir is not None:
            try:
                left_out.remember(config.base_dir, host, text, self._agent.loop.clock.wall())
            except OSError as error:
                self._agent.notice(f"that {host} is left out cannot be written down: {error.strerror}", "warning")
        self.cut_off = True
        self._line.over = True
        self._agent.end(words.End(int(ExitCode.BAD_NODE), f"{text}; the others go on without {self.name}"))

    def close(self) -> None:
        """See `Nodes.close`."""
        self._line.leave()

    # -- hangs: judged by the hub, over all ranks ------------------------------------------------------------------

    def judge(self, now: float) -> None:
        """See `Nodes.judge`."""
        agent = self._agent
        if self._own != agent.watch.own:
            self._own = agent.watch.own
            self._line.limits(
                {"soft_s": self._own.soft_s, "hard_s": self._own.hard_s, "first_s": self._own.first_s,
                 "automatic": self._own.automatic}
            )  # fmt: skip
        watched = {rank: worker for rank, worker in agent.crew.ranks.items() if worker.last is None}
        views = agent.watch.observe(watched, now)
        for rank, worker in watched.items():
            (agent.examiner.near if rank in agent.watch.near else agent.examiner.far)(worker)
        if now - self._viewed_s >= VIEW_S and agent.roster is not None:
            self._viewed_s = now
            told = [
                asdict(replace(view, phase="waiting") if watched[view.rank].done else view)
                for view in views
                if agent.watch.generation_of(view.rank) == agent.roster.generation
            ]
            self._line.views(agent.roster.generation, told, agent.watch.lessons())

    def asked_to_look(self, rank: int) -> None:
        """See `membership.Agent.asked_to_look`."""
        worker = self._agent.crew.ranks.get(rank)
        if worker is not None and worker.last is None:
            self._agent.watch.ask(worker, self._agent.loop.clock.now())

    def convicted(self, rank: int, action: str, text: str) -> None:
        """See `membership.Agent.convicted`."""
        worker = self._agent.crew.ranks.get(rank)
        if worker is not None and worker.last is None and self._agent.world.phase is Phase.RUNNING:
            self._agent.examiner.conclude(worker, Verdict(rank, action, text), self._agent.condemned)

    def notice(self, text: str, level: str = "info") -> None:
        """See `membership.Agent.notice`."""
        self._agent.notice(text, level)
