"""How what all nodes know comes together where it is decided from what a generation begins; see `node_shelf`.

Facts are told to the node of rank 0, again until its plan is there. What they are, and what follows: core/telling.py.
"""

from collections.abc import Callable, Mapping

from everstep.checkpoint.core.telling import checked
from everstep.recovery.api import Message, NodeHost

TELL_AGAIN_S = 2.0
Roster = list[int]
"""Epoch and generation."""
Decide = Callable[[Mapping[str, Message]], None]


class Council:
    """Of one node."""

    def __init__(self, decide: Decide, tell_plan: Callable[[str], None]) -> None:
        """`decide` is called on the node of rank 0 when all have told; `tell_plan` where somebody has not heard."""
        self._host_given: NodeHost | None = None
        self._decide, self._tell_plan = decide, tell_plan
        self.nodes: Mapping[str, str] = {}
        self._present: Roster = []
        self._leader = ""
        self._members: set[str] = set()
        self._facts: dict[str, Message] = {}
        self._own: Message = {}
        self._open = False  # the present roster has no plan yet
        self._again_s = 0.0

    def start(self, host: NodeHost) -> None:
        """Whose node this is."""
        self._host_given = host

    @property
    def _host(self) -> NodeHost:
        assert self._host_given is not None, "start() comes first"
        return self._host_given

    @property
    def _leads(self) -> bool:
        return self._leader == self._host.node

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """Who is here now: whoever is gone need not be awaited."""
        self.nodes = dict(nodes)
        for node in self._facts.keys() - nodes.keys():
            del self._facts[node]
        self._look()

    def enter(self, roster: Roster, leader: str, members: set[str], facts: Message) -> None:
        """A roster is entered, and this is what is known here."""
        self._present, self._leader, self._members = roster, leader, members
        self._own = {"kind": "snapshot.facts", "roster": roster, **facts}
        self._open, self._again_s = True, self._host.clock.now()
        if self._leads:
            self._facts[self._host.node] = self._own
            self._look()
        else:
            self._host.tell(leader, self._own)
        self._host.later(TELL_AGAIN_S)

    def close(self) -> None:
        """The plan of the present roster is known."""
        self._open = False

    def on_facts(self, node: str, message: Message) -> None:
        """A node tells what it knows. Raises as `checked` does."""
        checked(node, message)
        roster = [int(number) for number in message["roster"]]
        known = self._facts.get(node)
        if known is None or known["roster"] <= roster:
            self._facts[node] = {**message, "roster": roster}
        if self._leads and roster == self._present and not self._open:
            self._tell_plan(node)  # it has not heard
        self._look()

    def on_wanted(self, node: str, message: Message) -> None:
        """The node of rank 0 has not heard us."""
        if self._own and list(message["roster"]) == self._own["roster"]:
            self._host.tell(node, self._own)

    def _look(self) -> None:
        if not self._open or not self._leads:
            return
        awaited = set(self.nodes) | self._members
        told = {n: f for n, f in self._facts.items() if n in awaited and f["roster"] == self._present}
        if awaited <= told.keys():
            self._open = False
            self._decide(told)
            for node in sorted(awaited - {self._host.node}):
                self._tell_plan(node)

    def on_tick(self, now: float) -> None:
        """What may have been lost is told again."""
        if not self._open or now - self._again_s < TELL_AGAIN_S:
            return
        self._again_s = now
        self._host.later(TELL_AGAIN_S)
        if not self._leads:
            self._host.tell(self._leader, self._own)
            return
        for node in self.nodes:
            if node != self._host.node and self._facts.get(node, {}).get("roster") != self._present:
                self._host.tell(node, {"kind": "snapshot.facts_wanted", "roster": self._present})
