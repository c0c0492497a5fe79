"""Which snapshot is hashed next where nobody has read it yet, and how long whoever hashes rests.

Rule 1: the newest of each rank first, then the one before: a restore begins from these; an older one is written over
    next.
Rule 2: hashing reads all of a snapshot, and memory's bandwidth is the loop's: it rests REST times as long as it worked.
Rule 3: a snapshot that was written over while it was hashed shows that steps are faster than hashing. The rest doubles
    with each, until one is done: what is left in memory when steps pause is hashed then.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

KEPT = 2
LOOK_S = 0.25
REST = 19
MOST_S = 5.0


class Seen(NamedTuple):
    """One buffer as it looks now."""

    rank: int
    buffer: int
    sequence: int  # of the sealed snapshot in it; 0: void
    hashed: bool


def wanted(seen: Iterable[Seen]) -> list[Seen]:
    """Return what is to be hashed, in this order."""
    by_rank: defaultdict[int, list[Seen]] = defaultdict(list)
    for one in seen:
        if one.sequence:
            by_rank[one.rank].append(one)
    newest = [sorted(ones, key=lambda one: -one.sequence)[:KEPT] for _, ones in sorted(by_rank.items())]
    return [ones[n] for n in range(KEPT) for ones in newest if n < len(ones) and not ones[n].hashed]


def rest(last_s: float, worked_s: float, *, done: bool) -> float:
    """Return for how many seconds to rest, after a rest of `last_s` and work of `worked_s`.

    done: whether all that was begun was done.
    """
    least = max(LOOK_S, REST * worked_s)
    return least if done else max(least, min(2 * last_s, MOST_S))
