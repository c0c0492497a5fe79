"""What a slower tier asks of whoever holds the snapshots."""

from collections.abc import Sequence
from typing import Protocol

from everstep.checkpoint.core.plan import Plan, Sealed


class Source(Protocol):
    """The memory tier as a slower one sees it (`shelf.Shelf`)."""

    @property
    def plan(self) -> Plan | None:
        """From what the present generation began; decided before `on_roster` comes to this tier."""
        ...

    def fd(self, rank: int, buffer: int) -> int:
        """The descriptor of a buffer; stays the shelf's."""
        ...

    def hold(self, rank: int, buffer: int, offer: int = 0) -> None:
        """Keep a buffer from being overwritten, whatever becomes of its worker. `offer`: its hold that was for this."""
        ...

    def release(self, rank: int, buffer: int, offer: int = 0) -> None:
        """A buffer may be overwritten again; its worker is told. `offer`: nobody reads by that hold of the worker's."""
        ...

    def sealed(self) -> Sequence[Sealed]:
        """All snapshots that are whole now."""
        ...

    def sealed_here(self) -> Sequence[Sealed]:
        """Those of them that lie on this node, as they are now."""
        ...
