"""The memory tier where a restore may ask for one step: what is newer is left behind like any other rollback."""

from collections.abc import Mapping

from everstep.checkpoint.core.plan import Sealed
from everstep.checkpoint.far_shelf import LeadingShelf
from everstep.recovery.api import Message
from everstep.recovery.core.words import Roster


class AskedShelf(LeadingShelf):
    """`only`: while a roster is entered, the one step that it may begin from; None: the newest."""

    only: int | None = None

    def sealed(self) -> list[Sealed]:
        """See `Shelf.sealed`."""
        return [snapshot for snapshot in super().sealed() if self.only is None or snapshot.step == self.only]

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Shelf.on_roster`."""
        told = super().on_roster(roster)
        plan = self.plan
        if self.only is not None and plan is not None:
            for snapshot in super().sealed():
                if snapshot.step > plan.parent and snapshot.buffer not in self.held(snapshot.rank):
                    self._void(snapshot.rank, snapshot.buffer)
        return told
