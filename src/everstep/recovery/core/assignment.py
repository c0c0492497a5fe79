"""From what a roster's members brought to who holds which rank: pure, with its reason.

Rule 1: survivors keep their ranks; nobody is moved to make room. Where the world may shrink and nobody fills a gap,
        those above it move down, in order.
Rule 2: a gap is filled by a standby of the same node first, since that node's memory holds the rank's snapshot.
Rule 3: where ranks are given by whole nodes (`Nodes`), a node without ranks keeps its processes for those of a node
        that is lost: one such node takes all of them, if one has enough. Spares of nodes that have ranks take what is
        left, unless a node shall have all of its ranks or none (`Nodes.whole`). Where the world is smaller than it may
        be, whole nodes that are left make it larger.
Rule 4: the same facts give the same ranks. Agents may differ in facts, so compare-and-set decides between their
        proposals, never trust in this function.

How long to wait for standbys, and with how few ranks to go on, is the machine's business, not ours.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.ranks import brief
from everstep.recovery.core.words import Facts, Incarnation, Member, Roster


@dataclass(frozen=True, slots=True)
class Standby:
    """A fresh process without a rank, and the generation that was open or running when it was announced."""

    facts: Facts
    generation: int


Standbys = Mapping[Incarnation, Standby]


@dataclass(frozen=True, slots=True)
class Nodes:
    """What is to be known where ranks are given by whole nodes."""

    gone: frozenset[str]  # nodes that are lost
    share: int  # ranks of one node
    most: int  # ranks of the largest world
    whole: bool = False  # a node has all of its ranks or none


def first(epoch: int, world_size: int, standbys: Standbys, shares: Sequence[tuple[str, int]] = ()) -> Roster:
    """Return the roster of generation 0: the lowest slots of every node, numbered node by node as torchrun does.

    `shares`: how many of each node; left out, whoever has come.
    """
    chosen = sorted(standbys, key=lambda i: (standbys[i].facts.slot, standbys[i].facts.node, i))
    if shares:
        chosen = [
            who for node, share in shares for who in [i for i in chosen if standbys[i].facts.node == node][:share]
        ]
    chosen = chosen[:world_size]
    chosen.sort(key=lambda i: (standbys[i].facts.node, standbys[i].facts.slot, i))
    members = tuple(_member(rank, i, standbys[i], "started") for rank, i in enumerate(chosen))
    reason = f"generation 0 starts with ranks {brief(range(len(members)))}"
    return Roster(epoch, 0, members, _rest(standbys, chosen), reason)


def following(
    previous: Roster,
    survivors: Mapping[Incarnation, Facts],
    standbys: Standbys,
    nodes: Nodes | None = None,
) -> Roster:
    """Return the roster after `previous`: gaps are filled from `standbys`, those that remain are closed.

    `nodes`: where ranks are given by whole nodes.
    """
    generation = previous.generation + 1
    gaps = [m for m in previous.members if m.incarnation not in survivors]
    taken = _fill(gaps, standbys) if nodes is None else _fill_by_node(gaps, standbys, nodes, homes(previous))
    members: list[Member] = []
    for old in previous.members:
        if old.rank in taken:
            new = taken[old.rank]
            why = "spare" if standbys[new].generation < generation else "started"
            members.append(_member(len(members), new, standbys[new], why))
        elif old.incarnation in survivors:
            facts = survivors[old.incarnation]
            members.append(Member(len(members), old.incarnation, facts.node, facts.slot, facts.fresh, "kept"))
    closed = [gap.rank for gap in gaps if gap.rank not in taken]
    left = {who: standby for who, standby in standbys.items() if who not in set(taken.values())}
    come = [] if nodes is None else _come(left, nodes, {m.node for m in members}, len(members))
    members += [_member(len(members) + n, who, standbys[who], "started") for n, who in enumerate(come)]
    rest = _rest(left, come)
    reason = _shrunk(generation, closed, members) if closed else _reason(generation, gaps, members)
    if come:
        who_came = " and ".join(dict.fromkeys(standbys[who].facts.node for who in come))
        reason += f"; ranks {brief(range(len(members) - len(come), len(members)))} on {who_came}"
    return Roster(previous.epoch, generation, tuple(members), rest, reason)


def homes(roster: Roster) -> frozenset[str]:
    """Return the nodes on which its members run, or ran."""
    return frozenset(member.node for member in roster.members)


def final(previous: Roster, shortfall: str) -> Roster:
    """Return the roster that says: `previous` is finished, there is no generation after it."""
    return Roster(previous.epoch, previous.generation + 1, (), (), "all members have completed", shortfall)


def fillable(gaps: Iterable[Member], standbys: Standbys, nodes: Nodes, taken: frozenset[str]) -> int:
    """Count the gaps that `following` would fill, where ranks are given by whole nodes; `taken`: nodes with ranks."""
    lacks = Counter(gap.node for gap in gaps)
    waits = Counter(standby.facts.node for standby in standbys.values())
    own = {node: min(count, waits[node]) for node, count in lacks.items() if node in taken}
    lost = {node: count - own.get(node, 0) for node, count in lacks.items() if node in nodes.gone}
    idle = {node: count for node, count in waits.items() if node not in taken}
    if nodes.whole:
        filled = sum(own.values())
        for node in sorted(lost):
            taker = next((name for name in sorted(idle) if idle[name] >= lost[node]), None)
            if taker is not None:
                filled += lost[node]
                del idle[taker]
        return filled
    filled = min(sum(idle.values()), sum(lost.values()))
    return filled + min(sum(waits.values()) - sum(idle.values()), sum(lacks.values()) - filled)


def _come(standbys: Standbys, nodes: Nodes, taken: Iterable[str], size: int) -> list[Incarnation]:
    """Choose whole nodes without ranks, by name, until the world is as large as it may be."""
    waiting = _by_node(standbys)
    found: list[Incarnation] = []
    for node in sorted(waiting.keys() - set(taken)):
        if len(waiting[node]) >= nodes.share and size + len(found) + nodes.share <= nodes.most:
            found += waiting[node][: nodes.share]
    return found


def _fill_by_node(
    gaps: Sequence[Member], standbys: Standbys, nodes: Nodes, taken_nodes: frozenset[str]
) -> dict[int, Incarnation]:
    """As `_fill`; what a node without ranks has is for the ranks of a lost node, all of them if it has enough."""
    idle = {who: standby for who, standby in standbys.items() if standby.facts.node not in taken_nodes}
    busy = {who: standby for who, standby in standbys.items() if who not in idle}
    own: dict[int, Incarnation] = {}
    for node, waiting in _by_node(busy).items():
        own |= zip((g.rank for g in gaps if g.node == node), waiting, strict=False)
    lost = [g for g in gaps if g.node in nodes.gone and g.rank not in own]
    found, left = dict(own), _by_node(idle)
    for node in sorted({gap.node for gap in lost}):
        theirs = [gap.rank for gap in lost if gap.node == node]
        whole = next((name for name in sorted(left) if len(left[name]) >= len(theirs)), None)
        if whole is not None:
            found |= zip(theirs, left[whole], strict=False)
            left[whole] = [] if nodes.whole else left[whole][len(theirs) :]
    if nodes.whole:
        return found
    rest = iter([who for name in sorted(left) for who in left[name]])
    found |= zip((gap.rank for gap in lost if gap.rank not in found), rest, strict=False)
    used = set(found.values())
    others = {who: standby for who, standby in busy.items() if who not in used}
    return found | _fill([gap for gap in gaps if gap.rank not in found], others)


def _by_node(standbys: Standbys) -> dict[str, list[Incarnation]]:
    """Sort them by their nodes, each in the order of its slots."""
    found: dict[str, list[Incarnation]] = {}
    for who in sorted(standbys, key=lambda i: (standbys[i].facts.node, standbys[i].facts.slot, i)):
        found.setdefault(standbys[who].facts.node, []).append(who)
    return found


def _fill(gaps: Sequence[Member], standbys: Standbys) -> dict[int, Incarnation]:
    """Match ranks with standbys: all same-node matches first, then whoever is left, lowest slots first."""
    left = sorted(standbys, key=lambda i: (standbys[i].facts.slot, standbys[i].facts.node, i))
    taken: dict[int, Incarnation] = {}
    for same_node in (True, False):
        for gap in (g for g in gaps if g.rank not in taken):
            match = next((i for i in left if not same_node or standbys[i].facts.node == gap.node), None)
            if match is not None:
                taken[gap.rank] = match
                left.remove(match)
    return taken


def _member(rank: int, incarnation: Incarnation, standby: Standby, why: str) -> Member:
    return Member(rank, incarnation, standby.facts.node, standby.facts.slot, standby.facts.fresh, why)


def _rest(standbys: Standbys, chosen: Iterable[Incarnation]) -> tuple[Incarnation, ...]:
    return tuple(sorted(standbys.keys() - set(chosen)))


def _shrunk(generation: int, closed: Sequence[int], members: Sequence[Member]) -> str:
    gone = f"rank {closed[0]} of the last one is" if len(closed) == 1 else f"ranks {brief(closed)} of the last one are"
    return f"generation {generation}: {len(members)} ranks go on; {gone} lost"


def _reason(generation: int, gaps: Sequence[Member], members: Sequence[Member]) -> str:
    kept = brief(m.rank for m in members if m.why == "kept")
    parts = [f"generation {generation}: ranks {kept} kept"]
    for gap in gaps:
        new = members[gap.rank]
        place = "the same node" if new.node == gap.node else f"node {new.node}, no standby was left on {gap.node}"
        parts.append(f"rank {gap.rank} to slot {new.slot} on {place} ({new.why})")
    return "; ".join(parts)
