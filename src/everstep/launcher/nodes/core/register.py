"""The hub's register: which agents have come, who is refused and why, and which node each of them is.

Rule 1: all agents of a job were started alike: what differs from the terms of the first is refused by its name.
Rule 2: a node that was given a rank has it; the others get the lowest that are left, in the order in which they came.
        The numbers are given out when all are here, and never change.
Rule 3: nobody comes back: a node that is gone is gone, with all that it held.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.ranks import brief

WIRE = 1
"""Version of the words between agents and hub."""
_MEND: Mapping[str, tuple[str, str]] = {
    "version": ("Everstep {}", "Install one version on all nodes"),
    "wire": ("version {} of the words between nodes", "Install one version of Everstep on all nodes"),
    "job": ("a job of --rdzv-id {}", "Another job meets at this end point: give each its own --rdzv-endpoint"),
    "nnodes": ("--nnodes {}", "Give all nodes the same number"),
    "nproc": ("--nproc-per-node {}", "Give all nodes the same number"),
    "wrapped": ("a script that names everstep: {}", "Start the same script on all nodes"),
    "least": ("--min-world-size {}", "Give all nodes the same"),
    "restarts": ("--max-restarts {}", "Give all nodes the same"),
}


def node_name(number: int, nodes: int) -> str:
    """Return a node's name; sorted by name they stand in their order."""
    return f"node-{number:0{len(str(nodes - 1))}d}"


@dataclass
class Node:
    """One agent, by the number of its connection."""

    given: int | None
    address: str
    who: str  # for people: host name and pid
    name: str = ""  # when all are here


@dataclass
class Register:
    """See the rules above."""

    terms: Mapping[str, Any]
    here: dict[int, Node] = field(default_factory=dict[int, Node])
    complete: bool = False

    @property
    def nodes(self) -> int:
        """How many the job has."""
        return int(self.terms["nnodes"])

    @property
    def lacking(self) -> str:
        """Say whom the others wait for."""
        known = {node.given for node in self.here.values() if node.given is not None}
        if len(known) == len(self.here):
            return f"nodes {brief(set(range(self.nodes)) - known)} of {self.nodes}"
        return f"{self.nodes - len(self.here)} of {self.nodes} nodes"

    def join(self, connection: int, told: Mapping[str, Any]) -> str:
        """Take in an agent; return why not, or nothing."""
        refusal = self._refusal(told)
        if not refusal:
            self.here[connection] = Node(told["node_rank"], str(told["address"]), str(told["who"]))
            if len(self.here) == self.nodes:
                self._number()
        return refusal

    def _refusal(self, told: Mapping[str, Any]) -> str:
        terms, rank = told["terms"], told["node_rank"]
        for name, (what, mend) in _MEND.items():
            ours, theirs = self.terms.get(name), terms.get(name)
            if ours != theirs:
                return f"{what.format(theirs)} here, {what.format(ours)} on the node that came first. {mend}."
        if rank is not None and not (isinstance(rank, int) and 0 <= rank < self.nodes):
            return f"--node-rank {rank} of {self.nodes} nodes: give 0 to {self.nodes - 1}."
        taken = next((node.who for node in self.here.values() if rank is not None and node.given == rank), None)
        if taken is not None:
            return f"--node-rank {rank} is taken by {taken}. Give each node its own."
        if self.complete or len(self.here) == self.nodes:
            return f"all {self.nodes} nodes of this job have come already. A node that was lost cannot join again yet."
        return ""

    def _number(self) -> None:
        self.complete = True
        given = {node.given for node in self.here.values()}
        free = iter(number for number in range(self.nodes) if number not in given)
        for _, node in sorted(self.here.items()):
            node.given = next(free) if node.given is None else node.given
            node.name = node_name(node.given, self.nodes)

    @property
    def present(self) -> dict[str, str]:
        """The address of each node that is here, in the order of the nodes."""
        return {node.name: node.address for node in sorted(self.here.values(), key=lambda node: node.name)}

    def leave(self, connection: int) -> Node | None:
        """A connection has ended; return whose it was."""
        return self.here.pop(connection, None)

    def connection_of(self, name: str) -> int | None:
        """Return the connection of a node that is here."""
        return next((number for number, node in self.here.items() if node.name == name), None)
