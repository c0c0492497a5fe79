"""The memory tier of one node among several: all nodes begin a generation from one plan, which one of them makes.

 every node, its roster entered        node of rank 0                      every node
   facts: what is sealed here ───────▶  has all facts: decides once  ─────▶  plan, and the copies that its ranks take
                                                                            what lies elsewhere is fetched
   a rank that asks for buffers is answered, with what it begins from, when its copy is here

Rule 1: nobody but the node of rank 0 decides, for a roster once (core/copies.py): a node that goes while it tells may
have told one and not the other. If it is the node of rank 0 that goes, the roster goes with it. Where the agents see to
it that all hear the same facts before the roster (`telling`, `told`), each decides alike at once, and nothing is sent.
Rule 2: facts are what the headers say when the roster is entered: nothing of the last generation writes any more.
Rule 3: what is told may be lost with a line: facts are told again until the plan is there, and whoever has decided
tells it again to whoever asks. A node that is gone is not awaited, and no other limit is needed.

In a job that never had another node nothing of this happens: the plan comes with the roster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.checkpoint.beginnings import Beginnings, Id
from everstep.checkpoint.core.budget import room
from everstep.checkpoint.core.copies import Copy, Decision, Place, Version, alive, heard, merged, version_of
from everstep.checkpoint.core.placement import NOWHERE, Placement
from everstep.checkpoint.core.plan import Branch, Plan
from everstep.checkpoint.core.telling import checked, conclude, facts
from everstep.checkpoint.council import Council
from everstep.checkpoint.tier_settings import PEER
from everstep.events import Notice
from everstep.recovery.api import Host, Message
from everstep.recovery.core.words import Roster


class NodeShelf(Beginnings):
    """Companion `snapshot` of each node; `recovery.api.NodeCompanion`."""

    counted: Version | None = None
    """The save of the peer tier that counts since the present plan was made."""
    keepers: Placement = NOWHERE
    """Who had replicas of whom when the present roster was entered; known where the plan was made."""

    def __init__(self, *, readers: int = 0, for_copies: int = 0, **settings: Any) -> None:
        """`for_copies`: buffers of each rank that the peer tier needs; it does without where memory is short."""
        super().__init__(readers=readers + for_copies, **settings)
        self._for_copies = for_copies
        self.planned: list[Callable[[Plan], None]] = []
        """Called on the agent's thread when the plan of the present roster is known: at once, or a little later."""
        self._council = Council(self._conclude, self._tell_plan)
        self._heard: dict[str, Message] = {}
        self._decided: tuple[Id, Decision, list[Branch]] | None = None

    # several nodes

    @property
    def leader(self) -> str:
        """The node that decides for the present roster."""
        return self._roster.members[0].node if self._roster is not None else ""

    @property
    def branches(self) -> Sequence[Branch]:
        """The generations so far; with a plan, the present one is the last."""
        return self._branches

    @property
    def several(self) -> bool:
        """True where there are, or were, other nodes."""
        return self._several

    def newest_here(self) -> int:
        """Return how far the ranks that stand here are, as their snapshots show without being read."""
        here = set(self.here)
        steps = [s.step_hint() for each in self._sets.values() if each.rank in here for s in each.segments.values()]
        return max(steps, default=0)

    def start(self, host: Host) -> None:
        """See `Companion.start`; the host of an agent is a `NodeHost`."""
        super().start(host)
        self._council.start(self._node_host)

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`: whoever is gone need not be awaited, and what it had is gone with it."""
        self._several = self._several or len(nodes) > 1
        for node in self._heard.keys() - nodes.keys():
            del self._heard[node]
        self._council.on_nodes(nodes)

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`. What cannot be read is as good as lost."""
        try:
            match message["kind"]:
                case "snapshot.facts":
                    self._council.on_facts(node, message)
                case "snapshot.plan":
                    self._hear_plan(node, message)
                case "snapshot.facts_wanted":
                    self._council.on_wanted(node, message)
                case "snapshot.settled":
                    self._hear_settled(node, (int(message["roster"][0]), int(message["roster"][1])))
                case _:
                    return
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            text = f"node {node} said {message.get('kind')!r} in a form that is unknown here ({error!r})"
            self._host.emit(Notice(text=text, level="error"))

    # a roster

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`: with other nodes, what a rank begins from comes with its buffers."""
        self._roster = roster
        self._told_ranks.clear()
        self._failed.clear()
        self._settled_on = {
            of: told for of, told in self._settled_on.items() if of >= (roster.epoch, roster.generation)
        }
        if not self._several:
            told = super().on_roster(roster)
            self._announce()
            return told
        self._asks.clear()
        self._offered.clear()
        self._newest_hold.clear()  # see `Shelf.on_roster`
        self._forget_retired()
        self.plan = None
        heard_of, self._heard = self._heard, {}
        if heard_of.keys() >= set(self.homes.values()):
            self._conclude(heard_of)
        else:
            self._council.enter(
                [roster.epoch, roster.generation], self.leader, set(self.homes.values()), self.telling()
            )
        world = self._of_the_world()  # of ranks elsewhere the ledger alone wants to know
        follows = {"follows": True, "restore": world}
        beside = {"world": world, "decided": self.plan is not None}
        return {rank: {**self._told_ranks.get(rank, follows), **beside} for rank in range(roster.world_size)}

    def _of_the_world(self) -> Message | None:
        """What all begin from, where it is known; its tier is the furthest that any rank has to go to."""
        plan = self.plan
        if plan is None or plan.step is None:
            return None
        return {"step": plan.step, "tier": PEER if self._from_peers else plan.tier}

    def telling(self) -> Message:
        """What lies here and of which generations this node knows, when all of its ranks have left the last one."""
        mine = [
            Copy(self._node, False, sealed, self._segment(sealed.rank, sealed.buffer).size) for sealed in self.sealed()
        ]
        replicas = self.lender.replicas() if self.lender is not None else ()
        self._struck.clear()
        counted = self.lender.counted if self.lender is not None else None
        older = self.older() if self.older else ()
        free = room(self._look(), self.bytes, self._cap)
        return facts((*mine, *replicas), self._branches, counted, self._bad, self._struck_older, older, free)

    def told(self, node: str, message: Message) -> None:
        """A node, perhaps this one, tells what `telling` has returned there; all hear it before the next roster."""
        try:
            self._heard[node] = checked(node, message)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._host.emit(Notice(text=f"what node {node} keeps cannot be read ({error!r})", level="error"))

    def _conclude(self, told: Mapping[str, Message]) -> None:
        """Decide from what these nodes have told; the same from the same, wherever it is done."""
        roster = self._roster
        assert roster is not None, "facts are for a roster"
        found = conclude(told, self.homes, self.leader, roster.epoch, roster.generation)
        self.keepers, self.counted = found.keepers, found.counted
        self._decided = (roster.epoch, roster.generation), found.decision, found.branches
        self._follow(found.decision, found.branches)

    def _tell_plan(self, node: str) -> None:
        assert self._decided is not None, "called where it is decided"
        roster, decision, branches = self._decided
        body = {"kind": "snapshot.plan", "roster": list(roster), **decision.told_to(node, self.homes)}
        body["counted"] = self.counted
        self._tell(node, {**body, "branches": [[b.epoch, b.generation, b.parent] for b in branches]})

    def _hear_plan(self, node: str, message: Message) -> None:
        roster = self._roster
        if roster is None or list(message["roster"]) != [roster.epoch, roster.generation] or node != self.leader:
            return
        decision, lent = heard(message, roster.world_size)
        if self.plan is None:
            self.counted = version_of(message["counted"])
            self._follow(decision, merged([message["branches"]]), lent)

    def _follow(self, decision: Decision, branches: list[Branch], lent: set[Place] | None = None) -> None:
        """The plan is known: let go of what it leaves behind, and have what it names."""
        roster = self._roster
        assert roster is not None, "a plan is for a roster"
        if lent is None:
            lent = {copy.place for copy in decision.sources.values() if copy.node == self._node}
        plan = replace(decision.plan, sources={})
        for snapshot in self.sealed():
            if not alive(snapshot, branches, plan) and snapshot.buffer not in self.held(snapshot.rank):
                self._void(snapshot.rank, snapshot.buffer)
        self._council.close()
        self._branches = [*branches, Branch(roster.epoch, roster.generation, plan.parent)]
        needed = {(place.rank, place.number) for place in lent if not place.replica}
        self._let_go_of_those_elsewhere(needed)
        self._begun_from = {}
        self.plan, self._from_peers = plan, decision.from_peers
        other = decision.resharded
        self._unsettled = set(self.here) if other else set()
        self._announce()  # before a rank that waits is answered
        for copy in decision.sources.values():
            if (other and self.here) or copy.snapshot.rank in self.here:  # a spare node has nothing to begin
                self._have(copy, other)
        if not decision.sources:
            self._tell_those_here()
        self._proceed()
        self._host.later(0.0)  # slower tiers look at the plan, if it comes behind the roster

    def _announce(self) -> None:
        plan = self.plan
        assert plan is not None, "called when it is known"
        for call in self.planned:
            call(plan)

    # memory

    @property
    def bytes(self) -> int:
        """What the snapshots of this node take, with those that it keeps for others."""
        return super().bytes + (self.lender.bytes if self.lender is not None else 0)

    def _refusal(self, rank: int, needed: int) -> str | None:
        """What ranks here need goes before what is kept for others."""
        refusal = super()._refusal(rank, needed)
        if refusal is not None and self.lender is not None and self.lender.shed():
            refusal = super()._refusal(rank, needed)
        if refusal is not None and self._for_copies and self.lender is not None and self.lender.do_without(refusal):
            self._buffers, self._for_copies = self._buffers - self._for_copies, 0
            refusal = super()._refusal(rank, needed)
        return refusal

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`: what may have been lost is told again."""
        super().on_tick(now)
        self._council.on_tick(now)
