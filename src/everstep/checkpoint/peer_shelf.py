"""The memory tier without an agent: a rank's buffers are held by its watcher, which tells the others what is in them.

A fault that leaves every process alive costs at most a step here too. Where a process dies nobody can take its place,
and what it kept is of no use.

Rule 1: what is told when a rank has left its generation is what its headers say then; nothing writes them any more.
Rule 2: all watchers hear the same before a roster, and `core.plan.choose` is pure: all choose alike.
Rule 3: a buffer is voided by its own watcher alone.
"""

from collections.abc import Mapping

from everstep.checkpoint.core.budget import Memory, Need, shortage
from everstep.checkpoint.core.plan import MEMORY, Sealed
from everstep.checkpoint.shelf import Shelf
from everstep.recovery.api import Host, Message
from everstep.recovery.core.words import Roster


class PeerShelf(Shelf):
    """One rank's buffers. `neighbours`: how many ranks share this node's memory, this one included; `cap_bytes`: the
    most that the snapshots of all of them may take.
    """

    _unable = frozenset({MEMORY})  # one watcher has no descriptor of another's buffers

    def __init__(self, neighbours: int = 1, cap_bytes: int | None = None) -> None:
        super().__init__(cap_bytes=None if cap_bytes is None else cap_bytes // neighbours, readers=0)
        self._neighbours = neighbours
        self._world_size: int | None = None
        self._heard: dict[int, list[Sealed]] = {}
        self._at_start = Memory(0)

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        super().start(host)
        self._at_start = self._look()

    def telling(self) -> Message:
        """See `PeerCompanion.telling`: what is sealed here, oldest first, and what could not be read."""
        sealed = [[s.buffer, s.step, s.epoch, s.generation, s.parent, s.world_size] for s in super().sealed()]
        return {"sealed": sealed, "struck": sorted(buffer for _, buffer in self._struck)}

    def told(self, rank: int, message: Message) -> None:
        """See `PeerCompanion.told`."""
        self._heard[rank] = [Sealed(rank, *row) for row in message["sealed"]]
        self._struck |= {(rank, buffer) for buffer in message["struck"]}

    def sealed(self) -> list[Sealed]:
        """See `Shelf.sealed`: of all ranks, as they have told."""
        return [snapshot for rank in sorted(self._heard) for snapshot in self._heard[rank]]

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`. In a world of another size nothing that is kept here serves: it is let go."""
        told = super().on_roster(roster)
        self._heard.clear()
        if self._world_size not in (None, roster.world_size):
            self.close()
        self._world_size = roster.world_size
        return told

    def _void(self, rank: int, buffer: int) -> None:
        if any(each.rank == rank for each in self._sets.values()):
            super()._void(rank, buffer)

    def _refusal(self, rank: int, needed: int) -> str | None:
        """Judge for the whole node by what was free when we came, and for us alone by what is free now.

        The neighbours allocate theirs meanwhile, which is no reason to count them twice.
        """
        del rank
        mine = Need(1, self._buffers, needed, self._buffers * needed, self.bytes)
        ours = Need(self._neighbours, self._buffers, needed, self._neighbours * self._buffers * needed, self.bytes)
        return shortage(mine, self._look(), self._cap) or shortage(ours, self._at_start, None)


def make(told: Mapping[str, int | None]) -> PeerShelf:
    """Make the one beside a rank; by name, for a watcher knows nothing of snapshots."""
    return PeerShelf(told["neighbours"] or 1, told["cap_bytes"])
