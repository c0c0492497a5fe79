"""The memory tier on several nodes: each shelf holds the buffers of its node's ranks, and tells what is in them.

Rule 1: what is told is what the headers say when no rank of the node is in its generation any more: nothing writes
        them. All shelves hear the same before a roster, and `core.plan.choose` is pure: all choose alike.
Rule 2: a snapshot counts where it lies on the node on which its rank stands next: nobody carries it elsewhere. So a
        rank that is replaced on its own node goes on from memory, and one that has lost its node makes all go back.
Rule 3: a buffer is voided by its own node alone.
"""

from collections.abc import Mapping

from everstep.checkpoint.core.budget import Need, shortage
from everstep.checkpoint.core.plan import MEMORY, Sealed
from everstep.checkpoint.shelf import Shelf
from everstep.recovery.api import Message, NodeHost
from everstep.recovery.core.words import Roster

Row = list[int]


class ToldShelf(Shelf):
    """Companion `snapshot` of each node; `recovery.api.TellingCompanion`."""

    _unable = frozenset({MEMORY})  # one node has no descriptor of another's buffers
    _homes: Mapping[int, str]

    def __init__(self, *, cap_bytes: int | None = None, readers: int = 1) -> None:
        super().__init__(cap_bytes=cap_bytes, readers=readers)
        self._homes = {}
        self._heard: dict[str, tuple[list[Row], list[Row]]] = {}

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`: what a lost node held is lost."""
        self._heard = {node: told for node, told in self._heard.items() if node in nodes}

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`: all that shelves say is told before a roster."""

    def telling(self) -> Message:
        """See `TellingCompanion.telling`: what is sealed here, oldest first, and what could not be read."""
        sealed = [[s.rank, s.buffer, s.step, s.epoch, s.generation, s.parent, s.world_size] for s in super().sealed()]
        return {"sealed": sealed, "struck": sorted(list(one) for one in self._struck)}

    def told(self, node: str, message: Message) -> None:
        """See `TellingCompanion.told`."""
        self._heard[node] = (list(message["sealed"]), list(message["struck"]))

    def sealed(self) -> list[Sealed]:
        """See `Shelf.sealed`: of all ranks, each as the node has told on which it stands."""
        found = [(node, Sealed(*row)) for node, (rows, _) in sorted(self._heard.items()) for row in rows]
        return [snapshot for node, snapshot in found if self._homes.get(snapshot.rank) == node]

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`: the answer follows from what all have told, and from nothing else."""
        self._homes = {member.rank: member.node for member in roster.members}
        self._struck = {
            (rank, buffer)
            for node, (_, struck) in self._heard.items()
            for rank, buffer in struck
            if self._homes.get(rank) == node
        }
        told = super().on_roster(roster)
        self._heard.clear()
        return told

    def _void(self, rank: int, buffer: int) -> None:
        if self._homes.get(rank) == self._node:
            super()._void(rank, buffer)

    def _refusal(self, rank: int, needed: int) -> str | None:
        """Judge what this rank asks for, and that the others of this node will ask for as much."""
        here = {r for r, node in self._homes.items() if node == self._node}
        planned = {each.rank for each in self._sets.values() if each.size >= needed}
        missing = len(here - planned | {rank}) * self._buffers * needed
        need = Need(len(here), self._buffers, needed, missing, self.bytes)
        return shortage(need, self._look(), self._cap)

    @property
    def _node(self) -> str:
        host: NodeHost = self._host  # type: ignore[assignment]  # where there are several nodes, it is one
        return host.node
