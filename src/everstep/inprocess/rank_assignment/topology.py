"""The tree behind `Tree`: who is active where, and who takes over from whom. Pure; the same on every rank.

Leaves are ranks, in the order in which their keys first appeared; inner nodes are groups (job, rack, host) with limits.

Rule 1: a group with fewer living ranks than its least is lost as a whole, from the leaves up.
Rule 2: at the start ranks become active in tree order, as far as each group above them has room.
Rule 3: an active rank that is lost is replaced from its reserve: the groups above it are climbed for as long as their
        layer says RESERVE; who became inactive last, in the nearest group that has one, takes its active rank over.
Rule 4: else, where the layers above say BACKFILL, the highest active rank of the farthest such group moves into it;
        the last gap of the tree first, and nobody is asked twice.
Rule 5: what is left of the gaps is closed by shifting active ranks down; then the filter of sizes cuts from the top.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Limits(Protocol):
    """What the topology reads of a layer."""

    min_ranks: int
    max_ranks: int | None

    @property
    def reserves(self) -> bool:
        """May be climbed through for an inactive rank."""
        ...

    @property
    def backfills(self) -> bool:
        """May be climbed through for an active rank."""
        ...


@dataclass(eq=False)
class Leaf:
    """One rank, by the number that it had when the tree was built."""

    first: int
    parent: "Group"
    active: int | None = None
    alive: bool = True
    idle: int = 0  # counts up: who has become inactive last


@dataclass(eq=False)
class Group:
    """One group of one layer."""

    limits: Limits
    parent: "Group | None" = None
    groups: dict[str, "Group"] = field(default_factory=dict[str, "Group"])
    own: list[Leaf] = field(default_factory=list[Leaf])

    def leaves(self) -> Iterator[Leaf]:
        """All ranks below, the lost ones included, in tree order."""
        for group in self.groups.values():
            yield from group.leaves()
        yield from self.own

    def ancestry(self) -> Iterator["Group"]:
        """This group, the one above it, and so on."""
        group: Group | None = self
        while group is not None:
            yield group
            group = group.parent


class Topology:
    """One tree, from iteration to iteration."""

    def __init__(self, layers: Sequence[Limits], keys: Mapping[int, Sequence[str]]) -> None:
        """`keys`: each rank's keys, root first. Raises ValueError where the ranks do not agree on the root."""
        roots = {path[0] for path in keys.values()}
        if len(roots) != 1:
            raise ValueError(f"the first layer's key must be the same on every rank, and it is {sorted(roots)}")
        self._rests = 0
        self.root = Group(layers[0])
        for rank in sorted(keys):
            group = self.root
            for limits, key in zip(layers[1:], keys[rank][1:], strict=True):
                group = group.groups.setdefault(key, Group(limits, group))
            group.own.append(Leaf(rank, group))

    def ordered(self) -> bool:
        """Tell whether ranks follow one another as the tree has them."""
        order = [leaf.first for leaf in self.root.leaves()]
        return order == sorted(order)

    def living(self) -> list[Leaf]:
        """Those that are left, in tree order."""
        return [leaf for leaf in self.root.leaves() if leaf.alive]

    def active(self) -> list[Leaf]:
        """Those that run the function, by active rank."""
        return sorted((x for x in self.root.leaves() if x.active is not None), key=lambda x: x.active or 0)

    def start(self, allowed: Callable[[int], int] | None) -> None:
        """Rules 1, 2 and 5."""
        _prune(self.root)
        counts: dict[int, int] = {}
        number = 0
        for leaf in self.living():
            above = list(leaf.parent.ancestry())
            if not all(_room(group, counts) for group in above):
                self._rest(leaf)
                continue
            leaf.active, number = number, number + 1
            for group in above:
                counts[id(group)] = counts.get(id(group), 0) + 1
        self._cut(allowed)

    def lose(self, gone: Sequence[int], allowed: Callable[[int], int] | None) -> None:
        """Take the loss of ranks (by first number) into account: rules 1, 3, 4 and 5."""
        for leaf in self.root.leaves():
            if leaf.first in gone:
                leaf.alive = False
        _prune(self.root)
        vacant = [leaf for leaf in self.root.leaves() if leaf.active is not None and not leaf.alive]
        vacant = [leaf for leaf in vacant if not _from_reserve(leaf)]
        moved: list[Leaf] = []
        vacant = [leaf for leaf in reversed(vacant) if not _backfilled(leaf, moved)]
        for leaf in vacant:
            leaf.active = None
        for number, leaf in enumerate(self.active()):
            leaf.active = number
        self._cut(allowed)

    def _cut(self, allowed: Callable[[int], int] | None) -> None:
        active = self.active()
        if allowed is not None:
            for leaf in active[allowed(len(active)) :]:
                self._rest(leaf)

    def _rest(self, leaf: Leaf) -> None:
        self._rests += 1
        leaf.active, leaf.idle = None, self._rests


def _prune(group: Group) -> int:
    """Rule 1; returns how many live below."""
    living = sum(_prune(below) for below in group.groups.values()) + sum(leaf.alive for leaf in group.own)
    if living >= group.limits.min_ranks:
        return living
    for leaf in group.leaves():
        leaf.alive = False
    return 0


def _room(group: Group, counts: Mapping[int, int]) -> bool:
    return group.limits.max_ranks is None or counts.get(id(group), 0) < group.limits.max_ranks


def _from_reserve(lost: Leaf) -> bool:
    """Rule 3."""
    for group in lost.parent.ancestry():
        if not group.limits.reserves:
            return False
        idle = [leaf for leaf in group.leaves() if leaf.alive and leaf.active is None]
        if idle:
            spare = max(idle, key=lambda leaf: leaf.idle)
            spare.active, lost.active = lost.active, None
            return True
    return False


def _backfilled(lost: Leaf, moved: list[Leaf]) -> bool:
    """Rule 4; who has been asked in this round is not asked again."""
    domain: Group | None = None
    for group in lost.parent.ancestry():
        if not group.limits.backfills:
            break
        domain = group
    candidates = [x for x in domain.leaves() if x.alive and x.active is not None and x not in moved] if domain else []
    if not candidates:
        return False
    highest = max(candidates, key=lambda leaf: leaf.active or 0)
    moved.append(highest)
    if (highest.active or 0) < (lost.active or 0):
        return False
    highest.active, lost.active = lost.active, None
    return True
