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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
    order = {node: n for n, node in enumerate(sorted(domains))}
    load: Counter[str] = Counter(dict.fromkeys(domains, 0))
    kept: dict[int, list[str]] = {}
    for rank in sorted(homes):
        kept[rank] = []
        for node in before.get(rank, ())[:copies]:
            if node in domains and _fits(node, homes[rank], kept[rank], domains):
                kept[rank].append(node)
                load[node] += 1
    for rank in sorted(homes):
        while len(kept[rank]) < copies:
            open_to = list(_candidates(homes[rank], kept[rank], domains))
            if not open_to:
                break
            away = order.get(homes[rank], 0)
            node = min(open_to, key=lambda n: (load[n], (order[n] - away) % len(order)))
            kept[rank].append(node)
            load[node] += 1
    _level(kept, homes, domains, load)
    return {rank: tuple(nodes) for rank, nodes in kept.items()}


def _level(
    kept: Mapping[int, list[str]], homes: Mapping[int, str], domains: Mapping[str, str], load: Counter[str]
) -> None:
    """Move single copies from who has most to who has least, for as long as that levels anything."""
    moved = True
    while moved:
        moved = False
        for rank in sorted(kept):
            for place, node in enumerate(kept[rank]):
                rest = [other for n, other in enumerate(kept[rank]) if n != place]
                least = min(_candidates(homes[rank], rest, domains), key=lambda n: (load[n], n), default=node)
                if load[least] + 1 < load[node]:
                    load[node] -= 1
                    load[least] += 1
                    kept[rank][place] = least
                    moved = True


def _fits(node: str, home: str, rest: Sequence[str], domains: Mapping[str, str]) -> bool:
    return node in _candidates(home, rest, domains)


def _candidates(home: str, rest: Sequence[str], domains: Mapping[str, str]) -> Iterator[str]:
    """Nodes that may keep one more copy of a rank: in a domain that has none yet, where there is one; never at home."""
    others = [node for node in domains if node != home and node not in rest]
    own = domains.get(home)
    taken = {domains[node] for node in rest if node in domains}
    for wanted in (
        [n for n in others if domains[n] != own and domains[n] not in taken],
        [n for n in others if domains[n] != own],
        others,
    ):
        if wanted:
            yield from wanted
            return
