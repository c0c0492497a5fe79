"""What the memory tier of a node asks of the peer tier: copies that lie elsewhere, and memory."""

from collections.abc import Callable, Sequence
from typing import Protocol

from everstep.checkpoint.core.copies import Copy, Place, Version
from everstep.checkpoint.segments import Segment

Fetched = Callable[[Segment | str], None]
"""Called once with a copy, the caller's from then on, or with the reason why it cannot be had."""


class Lender(Protocol):
    """What the shelf asks of whoever keeps replicas and carries copies between nodes (`peer.Peer`)."""

    def replicas(self) -> Sequence[Copy]:
        """What others' ranks have here, oldest first."""
        ...

    @property
    def counted(self) -> Version | None:
        """The newest save of which it is known here that it counts."""
        ...

    def do_without(self, why: str) -> bool:
        """Have no buffers of ranks here for copies, for their memory is wanted; False where there are none."""
        ...

    def take(self, place: Place) -> Segment | None:
        """Hand over a replica that lies here, the caller's from now on; None where it is no more."""
        ...

    @property
    def bytes(self) -> int:
        """What the replicas here take."""
        ...

    def shed(self) -> bool:
        """Let go of all replicas, for their memory is wanted; False where there are none."""
        ...

    def fetch(self, copy: Copy, done: Fetched) -> None:
        """Have a copy brought here: see `Fetched`."""
        ...
