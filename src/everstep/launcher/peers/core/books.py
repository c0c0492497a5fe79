"""The hub's books: who has joined, what was said in which order, and who has been silent for too long.

Rule 1: all peers see the same facts in the same order: the order in which the hub wrote them down. So whoever wrote a
        key first has won, and nobody needs a compare-and-set of its own.
Rule 2: a fact counts when it comes back from the hub, to whoever said it as well.
Rule 3: a peer is lost when its connection ends or it has been silent for the lease; either way once, and for good: a
        watcher that finds itself cut off ends its worker (P15), so nobody comes back.
Rule 4: silence in a time in which the hub itself did not run is nobody's fault (the machine slept, all were stopped).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEASE_S = 12.0
"""Silence after which a peer is lost. A watcher gives up its hub earlier, at `WATCHERS_LEASE_S`, and ends its worker:
nobody goes on without a rank that still runs."""
WATCHERS_LEASE_S = 8.0
BEAT_S = 1.0
JUMP_S = 4.0
"""A gap between two looks of our own after which silence is forgiven."""

Fact = Mapping[str, Any]


@dataclass
class Peer:
    """One watcher, by the number of its connection."""

    rank: int
    incarnation: str
    heard_s: float


@dataclass
class Books:
    """See the rules above. `job` tells one wrapped call of one start of a job from all others."""

    job: str
    world_size: int
    peers: dict[int, Peer] = field(default_factory=dict[int, Peer])  # connections that live
    ranks: set[int] = field(default_factory=set[int])  # that have ever joined
    facts: list[Fact] = field(default_factory=list[Fact])  # said until all had joined, for those who come later
    keys: set[str] = field(default_factory=set[str])
    ended: bool = False  # one has left well: the end has been published
    _looked_s: float | None = None

    @property
    def complete(self) -> bool:
        """All ranks have joined."""
        return len(self.ranks) == self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined yet."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    def join(self, connection: int, told: Mapping[str, Any], now: float) -> str:
        """Take in a watcher; return why not, or nothing. What was said before is in `facts`, for it alone."""
        refusal = self._refusal(told)
        if not refusal:
            self.ranks.add(told["rank"])
            self.peers[connection] = Peer(told["rank"], told["incarnation"], now)
        return refusal

    def _refusal(self, told: Mapping[str, Any]) -> str:
        rank, size = told.get("rank"), told.get("world_size")
        if told.get("job") != self.job or not isinstance(told.get("incarnation"), str):
            return f"another job's ranks meet here ({self.job})"
        if size != self.world_size or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            return f"rank {rank} of {size} does not belong to a world of {self.world_size}: look at WORLD_SIZE"
        if rank in self.ranks:
            return f"rank {rank} has joined already: two processes were started with the same RANK"
        return ""

    def say(self, fact: Fact, key: str | None) -> bool:
        """Write a fact down; False where the key was taken: somebody said it first."""
        if key is not None:
            if key in self.keys:
                return False
            self.keys.add(key)
        if not self.complete:
            self.facts.append(fact)
        return True

    def heard(self, connection: int, now: float) -> None:
        """Any sign of life."""
        if connection in self.peers:
            self.peers[connection].heard_s = now

    def leave(self, connection: int) -> None:
        """A watcher says good-bye: its rank needs no watching any more."""
        self.ended = self.peers.pop(connection, None) is not None or self.ended

    def lose(self, connection: int) -> Peer | None:
        """Its connection has ended; return who is lost, or None where that was known or it never joined."""
        return self.peers.pop(connection, None)

    def look(self, now: float) -> list[int]:
        """Return the connections that have been silent for the lease; to be called about once in `BEAT_S`."""
        before, self._looked_s = self._looked_s, now
        if before is None or now - before > JUMP_S:
            for peer in self.peers.values():
                peer.heard_s = now
        return [number for number, peer in self.peers.items() if now - peer.heard_s > LEASE_S]

    @property
    def deserted(self) -> bool:
        """Somebody was here, and nobody is: the hub may end."""
        return bool(self.ranks) and not self.peers
