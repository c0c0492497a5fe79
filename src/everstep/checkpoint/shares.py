"""One shelf, several tiers that read from it: a buffer is free when the last of them has let it go."""

from collections import defaultdict
from collections.abc import Sequence

from everstep.checkpoint.core.plan import Plan, Sealed
from everstep.checkpoint.source import Source

Holders = defaultdict[tuple[int, int], set["Share"]]


class Share:
    """What one tier sees of the shelf; implements `source.Source`. Made by `shares`."""

    def __init__(self, shelf: Source, holders: Holders) -> None:
        self._shelf, self._holders = shelf, holders

    @property
    def plan(self) -> Plan | None:
        """See `Source.plan`."""
        return self._shelf.plan

    def fd(self, rank: int, buffer: int) -> int:
        """See `Source.fd`."""
        return self._shelf.fd(rank, buffer)

    def hold(self, rank: int, buffer: int, offer: int = 0) -> None:
        """See `Source.hold`."""
        self._shelf.hold(rank, buffer, offer)
        self._holders[rank, buffer].add(self)

    def release(self, rank: int, buffer: int, offer: int = 0) -> None:
        """See `Source.release`: this tier's hold is gone; the buffer is free where no other tier has one."""
        if offer:
            self._shelf.release(rank, buffer, offer)
            return
        holders = self._holders[rank, buffer]
        holders.discard(self)
        if not holders:
            del self._holders[rank, buffer]
            self._shelf.release(rank, buffer)

    def sealed(self) -> Sequence[Sealed]:
        """See `Source.sealed`."""
        return self._shelf.sealed()

    def sealed_here(self) -> Sequence[Sealed]:
        """See `Source.sealed_here`."""
        return self._shelf.sealed_here()


def shares(shelf: Source, count: int) -> list[Share]:
    """Return one share of the shelf for each of `count` tiers."""
    holders: Holders = defaultdict(set)
    return [Share(shelf, holders) for _ in range(count)]
