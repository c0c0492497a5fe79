"""The hub's register: which agents have come, who is refused and why, and which node each of them is.

Rule 1: all agents of a job were started alike: what differs from the terms of the first is refused by its name.
Rule 2: a node that was given a rank has it; the others get the lowest that are left, in the order in which they came.
        A number is one node's at a time, from when all have met to when that node is gone.
Rule 3: the job begins when every place is taken, of nodes at work and of spare ones; or when as many as must be at work
        are here and `last_call_s` have passed since, as torchrun's last call.
Rule 4: who comes later waits in line for a place: one that was never taken, or that of a node which is gone. So a node
        that comes back, or another in its place, is let in when its former self has been given up, and never beside it.
Rule 5: nodes stand in the order in which they were let in, first those that the job began with. A place in that order,
        and the number that tells it (`Node.ordinal`), is never given twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.ranks import brief

WIRE = 2
"""Version of the words between agents and hub."""
_MEND: Mapping[str, tuple[str, str]] = {
    "version": ("Everstep {}", "Install one version on all nodes"),
    "wire": ("version {} of the words between nodes", "Install one version of Everstep on all nodes"),
    "job": ("a job of --rdzv-id {}", "Another job meets at this end point: give each its own --rdzv-endpoint"),
    "script": (
        "{} is to run",
        "Another job meets at this end point: give each its own --rdzv-endpoint. Of one job whose nodes begin files of "
        "different names, give all nodes the same --rdzv-id",
    ),
    "nnodes": ("--nnodes {}", "Give all nodes the same number"),
    "spare_nodes": ("--spare-nodes {}", "Give all nodes the same number"),
    "nproc": ("--nproc-per-node {}", "Give all nodes the same number"),
    "wrapped": ("a script that names everstep: {}", "Start the same script on all nodes"),
    "least": ("--min-world-size {}", "Give all nodes the same"),
    "restarts": ("--max-restarts {}", "Give all nodes the same"),
}
TAKEN_S = 12.0
"""So long may a rank be another's, or every place be taken, when a node comes to a job that runs: by then a node that
says nothing has been given up. It is `lease.GIVEN_AWAY_S`, and some more."""


def node_name(number: int, nodes: int) -> str:
    """Return a node's name; sorted by name they stand in their order."""
    return f"node-{number:0{len(str(nodes - 1))}d}"


@dataclass
class Node:
    """One agent, by the number of its connection."""

    given: int | None
    address: str
    who: str  # for people: host name and pid
    came_s: float = 0.0
    name: str = ""  # when it has a place
    ordinal: int = -1
    here: bool = False  # it hears what is told


@dataclass
class Register:
    """See the rules above. Times are seconds, by one clock."""

    terms: Mapping[str, Any]
    last_call_s: float = 30.0
    here: dict[int, Node] = field(default_factory=dict[int, Node])
    line: dict[int, Node] = field(default_factory=dict[int, Node])  # who waits for a place
    complete: bool = False
    at_work: tuple[str, ...] = ()
    """The nodes that the job began with, spare ones left out; known when it is complete."""
    _enough_s: float | None = None
    _let_in: int = 0

    @property
    def least(self) -> int:
        """With how few nodes the job may begin."""
        return int(str(self.terms["nnodes"]).partition(":")[0])

    @property
    def most(self) -> int:
        """How many are at work where they come in time."""
        return int(str(self.terms["nnodes"]).rpartition(":")[2])

    @property
    def places(self) -> int:
        """How many there are, with those of spare nodes."""
        return self.most + int(self.terms.get("spare_nodes") or 0)

    @property
    def lacking(self) -> str:
        """Say whom the others wait for."""
        known = {node.given for node in self.here.values() if node.given is not None}
        if self.least == self.most == self.places and len(known) == len(self.here):
            return f"nodes {brief(set(range(self.places)) - known)} of {self.places}"
        if len(self.here) < self.least:
            few = "" if self.least == self.most else " at least"
            return f"{self.least - len(self.here)} of{few} {self.least} nodes"
        return f"{self.places - len(self.here)} more nodes, for {self.last_call_s:g} s at most"

    def join(self, connection: int, told: Mapping[str, Any], now: float) -> str:
        """Take in an agent, or into the line where the job has begun; return why not, or nothing."""
        refusal = self._refusal(told)
        if refusal:
            return refusal
        node = Node(told["node_rank"], str(told["address"]), str(told["who"]), now)
        if self.complete:
            self.line[connection] = node
            return ""
        self.here[connection] = node
        if len(self.here) == self.least:
            self._enough_s = now
        return ""

    def look(self, now: float) -> bool:
        """Tell whether the job begins now: then everybody has a name."""
        if self.complete or self._enough_s is None or len(self.here) < self.least:
            return False
        if len(self.here) < self.places and now - self._enough_s < self.last_call_s:
            return False
        self._number()
        return True

    def _refusal(self, told: Mapping[str, Any]) -> str:
        terms, rank = told["terms"], told["node_rank"]
        for name, (what, mend) in _MEND.items():
            ours, theirs = self.terms.get(name), terms.get(name)
            if ours != theirs:
                return f"{what.format(theirs)} here, {what.format(ours)} on the node that came first. {mend}."
        if rank is not None and not (isinstance(rank, int) and 0 <= rank < self.places):
            return f"--node-rank {rank} of {self.places} nodes: give 0 to {self.places - 1}."
        taken = self._holder(rank)
        if not self.complete and taken is not None:
            return f"--node-rank {rank} is taken by {taken.who}. Give each node its own."
        return ""

    def _holder(self, rank: int | None) -> Node | None:
        return next((node for node in self.here.values() if rank is not None and node.given == rank), None)

    def _number(self) -> None:
        self.complete = True
        given = {node.given for node in self.here.values()}
        free = iter(number for number in range(self.places) if number not in given)
        for _, node in sorted(self.here.items()):
            node.given = next(free) if node.given is None else node.given
        for node in sorted(self.here.values(), key=lambda node: node.given or 0):
            self._name(node)
            node.here = True
        self.at_work = tuple(node.name for node in self._in_order())[: self.most]

    def _name(self, node: Node) -> None:
        assert node.given is not None, "numbered"
        node.name, node.ordinal = node_name(node.given, self.places), self._let_in
        self._let_in += 1

    def _in_order(self) -> list[Node]:
        return sorted((node for node in self.here.values() if node.name), key=lambda node: node.ordinal)

    @property
    def present(self) -> dict[str, str]:
        """The address of each node that hears the job's facts, in the order in which they were let in."""
        return {node.name: node.address for node in self._in_order() if node.here}

    def let_in(self) -> list[int]:
        """Give places to those in line for whom there is one; return their connections."""
        found: list[int] = []
        for connection, node in sorted(self.line.items()):
            taken = {other.given for other in self.here.values()}
            free = [number for number in range(self.places) if number not in taken]
            if node.given not in (None, *free) or not free:
                continue
            node.given = free[0] if node.given is None else node.given
            self._name(node)
            self.here[connection] = self.line.pop(connection)
            found.append(connection)
        return found

    def turned_away(self, now: float) -> dict[int, str]:
        """Whoever has been in line for too long leaves it; return their connections, and why there is no place."""
        found: dict[int, str] = {}
        for connection, node in list(self.line.items()):
            if now - node.came_s <= TAKEN_S:
                continue
            holder = self._holder(node.given)
            found[connection] = (
                f"all {self.places} nodes of this job are here. --spare-nodes N has places for N nodes more."
                if holder is None
                else f"--node-rank {node.given} is taken by {holder.who}, which lives. Give each node its own."
            )
            del self.line[connection]
        return found

    def leave(self, connection: int) -> Node | None:
        """A connection has ended; return whose it was, if it had come in."""
        if self.line.pop(connection, None) is not None:
            return None
        node = self.here.pop(connection, None)
        if node is not None and not self.complete and len(self.here) < self.least:
            self._enough_s = None
        return node

    def connection_of(self, name: str) -> int | None:
        """Return the connection of a node that is here."""
        return next((number for number, node in self.here.items() if node.name == name), None)
