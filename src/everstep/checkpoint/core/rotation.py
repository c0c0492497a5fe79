"""Which buffer of a rank the next snapshot goes into.

Rule 1: a held buffer (a slower tier reads it) is never given out.
Rule 2: of the others, a void one first, else the oldest. A rank that ends step k+1 proves only that its peers have
    entered the reduction of k+1: their copy of k may still be in flight, so k-1 must stay until k+1 is sealed here.
    Three buffers that rotate so always keep the newest two sealed ones, and no kill leaves the world without a common
    step; two do not (EXPERIMENTS E15, M1).
Rule 3: so a restored snapshot stays until its generation has sealed two steps on this rank, and therefore one on every
    rank: M11's pin needs nothing else.
Rule 4: a hold is granted only while `ROTATING` buffers are left to rotate (M2); else the slower tier does without.

It rests on a collective in every step. Ranks that never meet may run apart by any number of steps; then there is no
common step, which the plan says, and an older tier serves.
"""

from collections.abc import Iterable, Set
from typing import NamedTuple

ROTATING = 3


class Slot(NamedTuple):
    """One buffer as the rotation sees it."""

    buffer: int
    sequence: int  # of the snapshot that is sealed, or being copied, in it; 0: void


def choose(slots: Iterable[Slot], held: Set[int] = frozenset()) -> int | None:
    """Return the buffer for the next snapshot, or None where every one is held."""
    free = [slot for slot in slots if slot.buffer not in held]
    return min(free, key=lambda s: (s.sequence, s.buffer)).buffer if free else None


def grants(buffers: int, held: Set[int], buffer: int) -> bool:
    """True when `buffer` may be held as well: enough are left to rotate."""
    return buffer in held or buffers - len(held) > ROTATING
