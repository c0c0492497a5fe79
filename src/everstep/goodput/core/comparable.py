"""Whether a run's losses can be compared bit for bit with those of a run without faults.

The same code gives other bits with another number of threads, another processor or device, another version, and on
another place in the world (EXPERIMENTS B4, B5). Each rank says what it has whenever its loop begins; what is different
from how the run began is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.events import Numerics, Record

AT_FIRST = "when the run began"
MOST_TOLD = 64


@dataclass(frozen=True, slots=True)
class _Seen:
    node: str
    facts: Mapping[str, str]


class Comparison:
    """Hears of each rank in each generation; says what has changed, each thing once."""

    def __init__(self) -> None:
        self._first: dict[int, _Seen] = {}
        self._world_size: int | None = None
        self._told: set[str] = set()

    def hear(self, rank: int, world_size: int, node: str, facts: Mapping[str, str]) -> list[str]:
        """`rank` begins its loop. Return what is different, a sentence each."""
        found: list[str] = []
        if self._world_size is None:
            self._world_size = world_size
        elif world_size != self._world_size:
            found.append(f"the world has {world_size} ranks, and had {self._world_size} {AT_FIRST}")
        first = self._first.get(rank)
        if first is not None:
            found += self._changed(rank, first, _Seen(node, facts))
        elif world_size == self._world_size:
            self._first[rank] = _Seen(node, dict(facts))
            found += self._unlike(rank, facts)
        new = [text for text in found if text not in self._told]
        self._told.update(new[: MOST_TOLD - len(self._told)])
        return new

    def _changed(self, rank: int, first: _Seen, now: _Seen) -> list[str]:
        moved = [f"rank {rank} is on another node than {AT_FIRST}"] if now.node != first.node else []
        return moved + [
            f"rank {rank}: {name} {now.facts.get(name, 'unknown')}, and {first.facts.get(name, 'unknown')} {AT_FIRST}"
            for name in sorted(first.facts.keys() | now.facts.keys())
            if now.facts.get(name) != first.facts.get(name)
        ]

    def _unlike(self, rank: int, facts: Mapping[str, str]) -> list[str]:
        """Ranks that are unlike each other: a run is to be compared with one that has the same ones in each place."""
        other = min(self._first)
        against = self._first[other].facts
        return [
            f"ranks are unlike: {name} {facts.get(name, 'unknown')} on rank {rank}, "
            f"{against.get(name, 'unknown')} on rank {other}"
            for name in sorted(facts.keys() | against.keys())
            if facts.get(name) != against.get(name)
        ]


def differences(records: Sequence[Record]) -> list[str]:
    """Return what a run's own records, in the order of time, say of it."""
    comparison, found = Comparison(), list[str]()
    for record in records:
        event, stamp = record.event, record.stamp
        if isinstance(event, Numerics) and stamp.rank is not None:
            found += comparison.hear(stamp.rank, event.world_size, stamp.boot_id, event.facts)
    return found


def verdict(found: Sequence[str]) -> str:
    """Return the line of a report; empty where there is nothing to say."""
    if not found:
        return ""
    told = "; ".join(found[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""  # noqa: PLR2004
    return f"losses are not comparable bit for bit with those of a run without faults: {told}{more}"
