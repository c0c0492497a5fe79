"""Which nodes keep copies of which rank's snapshots.

Rule 1: a copy is for the loss of a node, so it never lies on the rank's own. Nodes that fail together (one rack, one
power supply) bear one label, their failure domain; a copy lies in another domain wherever there is one, and further
copies in further domains.
Rule 2: nobody keeps two more than another who could have taken one of them: memory is needed where copies lie.
Rule 3: a keeper stays what it was as long as rules 1 and 2 allow: when a node goes, what it kept, and what lived on it,
finds new keepers, and little else moves. So the placement before is part of the question.

Any number of ranks and nodes will do: no group size has to divide the world (the cliques of others must). Rejected: a
ring of neighbours, in which the loss of one node moves every copy behind it; hashing alone, which is unbalanced where
there are few nodes, as there are.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Placement = Mapping[int, tuple[str, ...]]
"""Rank → the nodes that keep a copy of its snapshots."""

NOWHERE: Placement = {}


def place(
    homes: Mapping[int, str], domains: Mapping[str, str], copies: int = 1, before: Placement = NOWHERE
) -> Placement:
    """Choose keepers. `homes`: rank → the node where it stands; `domains`: every node that is here → its domain.

    A rank has fewer keepers than `copies` where there are fewer other nodes, and none on a lone node. The same question
    has the same answer everywhere.
    """
    load, open_to = _Load(domains), _Candidates(domains)
    kept: dict[int, list[str]] = {}
    for rank in sorted(homes):
        kept[rank] = []
        for node in before.get(rank, ())[:copies]:
            if node in domains and node in open_to(homes[rank], kept[rank]):
                kept[rank].append(node)
                load.add(node)
    for rank in sorted(homes):
        while len(kept[rank]) < copies:
            keeper = load.least_of(open_to(homes[rank], kept[rank]))
            if keeper is None:
                break
            kept[rank].append(keeper)
            load.add(keeper)
    _level(kept, homes, open_to, load)
    return {rank: tuple(nodes) for rank, nodes in kept.items()}


class _Load:
    """How many copies each node keeps, and the least that any does."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.of = dict.fromkeys(nodes, 0)
        self._nodes = Counter(self.of.values())  # load → how many nodes have it
        self.least = 0

    def add(self, node: str, copies: int = 1) -> None:
        """A node keeps one more, or one fewer."""
        self._nodes[self.of[node]] -= 1
        self.of[node] += copies
        self._nodes[self.of[node]] += 1
        self.least = min(self.least, self.of[node])
        while not self._nodes[self.least]:
            self.least += 1

    def least_of(self, nodes: Sequence[str]) -> str | None:
        """Return who keeps least, the first of several; None where there is nobody."""
        found: str | None = None
        for node in nodes:
            if found is None or self.of[node] < self.of[found]:
                found = node
                if self.of[node] == self.least:
                    break
        return found


def _level(kept: Mapping[int, list[str]], homes: Mapping[int, str], open_to: "_Candidates", load: _Load) -> None:
    """Move single copies from who has most to who has least, for as long as that levels anything."""
    moved = True
    while moved:
        moved = False
        for rank in sorted(kept):
            for place, node in enumerate(kept[rank]):
                if load.of[node] <= load.least + 1:
                    continue
                rest = [other for n, other in enumerate(kept[rank]) if n != place]
                least = load.least_of(open_to(homes[rank], rest))
                if least is not None and load.of[least] + 1 < load.of[node]:
                    load.add(node, -1)
                    load.add(least)
                    kept[rank][place] = least
                    moved = True


class _Candidates:
    """Nodes that may keep one more copy of a rank: in a domain that has none yet, where there is one; never at home.

    In an order that begins behind the rank's own node, so that not all begin with the same.
    """

    def __init__(self, domains: Mapping[str, str]) -> None:
        self._domains = domains
        self._order = sorted(domains)
        self._known: dict[tuple[str, frozenset[str]], tuple[str, ...]] = {}

    def __call__(self, home: str, rest: Sequence[str]) -> tuple[str, ...]:
        """Return them, for a rank that stands at `home` and has copies on `rest`."""
        key = home, frozenset(rest)
        if key not in self._known:
            self._known[key] = self._found(home, key[1])
        return self._known[key]

    def _found(self, home: str, rest: frozenset[str]) -> tuple[str, ...]:
        at = bisect_right(self._order, home)
        domains, own = self._domains, self._domains.get(home)
        others = [node for node in (*self._order[at:], *self._order[:at]) if node != home and node not in rest]
        abroad = [node for node in others if domains[node] != own]
        taken = {domains[node] for node in rest if node in domains}
        fresh = [node for node in abroad if domains[node] not in taken]
        return tuple(fresh or abroad or others)
