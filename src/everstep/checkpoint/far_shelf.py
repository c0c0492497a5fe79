"""Snapshots that lie on several hosts: what the leading keeper knows of them, and what another one does with its own.

Rule 1: buffers, and what holds them, are the host's own on which they lie: the leading keeper orders, and never asks.
Rule 2: which are sealed the leading keeper knows as their host has told it when their rank could write no more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.checkpoint.core.plan import Sealed
from everstep.checkpoint.keeper_far import Far
from everstep.checkpoint.shelf import Shelf
from everstep.recovery.api import Message
from everstep.recovery.core.words import Roster


class LeadingShelf(Shelf):
    """Of the leading keeper: its own buffers, and orders for those elsewhere. `far` None: there is no elsewhere."""

    def __init__(self, *, far: Far | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._far = far
        self._far_sealed: dict[int, list[Sealed]] = {}

    def far_sealed(self, rank: int, rows: Sequence[Sequence[int]]) -> None:
        """So the buffers of a rank elsewhere are. Raises TypeError where a row cannot be one, ValueError for a rank."""
        found = [Sealed(*row) for row in rows]
        if any(one.rank != rank for one in found):
            raise ValueError(f"a snapshot of another rank than {rank}")
        self._far_sealed[rank] = found

    def forget(self, ranks: Sequence[int]) -> None:
        """Their host is gone."""
        for rank in ranks:
            self._far_sealed.pop(rank, None)

    def _elsewhere(self, rank: int) -> Far | None:
        return self._far if self._far is not None and self._far.at(rank) is not None else None

    def hold(self, rank: int, buffer: int, offer: int = 0) -> None:
        """See `Source.hold`."""
        far = self._elsewhere(rank)
        if far is None:
            super().hold(rank, buffer, offer)
        else:
            far.order(rank, "hold", buffer=buffer, offer=offer)

    def release(self, rank: int, buffer: int, offer: int = 0) -> None:
        """See `Source.release`."""
        far = self._elsewhere(rank)
        if far is None:
            super().release(rank, buffer, offer)
        else:
            far.order(rank, "release", buffer=buffer, offer=offer)

    def sealed(self) -> list[Sealed]:
        """See `Shelf.sealed`."""
        return [*super().sealed(), *(one for rows in self._far_sealed.values() for one in rows)]

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Shelf.on_roster`; what is held elsewhere is told to a rank there, with its buffers."""
        if self._far is not None:
            self._far.enter()
        return super().on_roster(roster)

    def _void(self, rank: int, buffer: int) -> None:
        far = self._elsewhere(rank)
        if far is None:
            super()._void(rank, buffer)
        else:
            self._far_sealed[rank] = [one for one in self._far_sealed.get(rank, []) if one.buffer != buffer]
            far.order(rank, "void", buffer=buffer)

    def _ranks_here(self) -> Sequence[int]:
        return super()._ranks_here() if self._far is None else self._far.ours


class DeputyShelf(Shelf):
    """Of the keeper of another host than the leading one: `ranks` stand here."""

    def __init__(self, ranks: Sequence[int], **settings: Any) -> None:
        super().__init__(**settings)
        self._here = tuple(ranks)

    def enter(self) -> None:
        """A generation begins."""
        self.on_stopped(0)
        self._offered.clear()  # see `Shelf.on_roster`
        self._newest_hold.clear()
        self._forget_retired()

    def void(self, rank: int, buffer: int) -> None:
        """What is in a buffer is left behind; a reader of it keeps it."""
        if buffer not in self.held(rank):
            self._void(rank, buffer)

    def rows(self, rank: int) -> list[list[int]]:
        """What is sealed of a rank, oldest first, as it is told."""
        found = [one for one in self.sealed() if one.rank == rank]
        return [[o.rank, o.buffer, o.step, o.epoch, o.generation, o.parent, o.world_size] for o in found]

    def _ranks_here(self) -> Sequence[int]:
        return self._here
