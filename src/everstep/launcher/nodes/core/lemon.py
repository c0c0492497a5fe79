"""Whether a node is a bad one: so many generations have ended by a fault of one of its ranks, within so long. Pure."""

from dataclasses import dataclass, field

MOST = 3
WITHIN_S = 3600.0


@dataclass
class Lemon:
    """A node's own count. `most` 0: nothing makes it one. Times are seconds, by one clock."""

    most: int = MOST
    within_s: float = WITHIN_S
    _at: dict[int, float] = field(default_factory=dict[int, float])

    def fault(self, generation: int, now: float) -> bool:
        """A rank here has ended a generation (told once more where a better cause is known); True: it is one now."""
        self._at.setdefault(generation, now)
        self._at = {g: at for g, at in self._at.items() if now - at <= self.within_s}
        return 0 < self.most <= len(self._at)

    def __str__(self) -> str:
        return f"{len(self._at)} faults of its ranks within {self.within_s:g} s"


def spared(present: int, leaving: int, ranks: int, share: int) -> bool:
    """Tell whether one more of the nodes that are here, of which so many leave already, may leave too.

    `ranks`: the fewest that the job goes on with, `share` of them on a node.
    """
    return (present - leaving - 1) * share >= ranks
