"""From what a roster's members brought to who holds which rank: pure, with its reason.

Rule 1: survivors keep their ranks; nobody is moved to make room. Where the world may shrink and nobody fills a gap,
        those above it move down, in order.
Rule 2: a gap is filled by a standby of the same node first, since that node's memory holds the rank's snapshot.
Rule 3: the same facts give the same ranks. Agents may differ in facts, so compare-and-set decides between their
        proposals, never trust in this function.

How long to wait for standbys, and with how few ranks to go on, is the machine's business, not ours.
"""

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
    reason = f"generation 0 starts with ranks {brief(range(world_size))}"
    return Roster(epoch, 0, members, _rest(standbys, chosen), reason)


def following(previous: Roster, survivors: Mapping[Incarnation, Facts], standbys: Standbys) -> Roster:
    """Return the roster after `previous`: gaps are filled from `standbys`, those that remain are closed."""
    generation = previous.generation + 1
    gaps = [m for m in previous.members if m.incarnation not in survivors]
    taken = _fill(gaps, standbys)
    members: list[Member] = []
    for old in previous.members:
        if old.rank in taken:
            new = taken[old.rank]
            why = "spare" if standbys[new].generation < generation else "started"
            members.append(_member(len(members), new, standbys[new], why))
        elif old.incarnation in survivors:
            facts = survivors[old.incarnation]
            members.append(Member(len(members), old.incarnation, facts.node, facts.slot, facts.fresh, "kept"))
    rest = _rest(standbys, taken.values())
    closed = [gap.rank for gap in gaps if gap.rank not in taken]
    reason = _shrunk(generation, closed, members) if closed else _reason(generation, gaps, members)
    return Roster(previous.epoch, generation, tuple(members), rest, reason)


def final(previous: Roster, shortfall: str) -> Roster:
    """Return the roster that says: `previous` is finished, there is no generation after it."""
    return Roster(previous.epoch, previous.generation + 1, (), (), "all members have completed", shortfall)


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
