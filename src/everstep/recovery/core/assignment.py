"""From what a roster's members brought to who holds which rank: pure, with its reason.

Rule 1: survivors keep their ranks; nobody is moved to make room.
Rule 2: a gap is filled by a standby of the same node first, since that node's memory holds the rank's snapshot.
Rule 3: the same facts give the same ranks. Agents may differ in facts, so compare-and-set decides between their
        proposals, never trust in this function.

Not enough standbys is no roster: how long to wait is the machine's business, not ours. Shrinking the world is not
built yet.
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


def first(epoch: int, world_size: int, standbys: Standbys) -> Roster:
    """Return the roster of generation 0: the lowest slots of every node, numbered node by node as torchrun does."""
    chosen = sorted(standbys, key=lambda i: (standbys[i].facts.slot, standbys[i].facts.node, i))[:world_size]
    chosen.sort(key=lambda i: (standbys[i].facts.node, standbys[i].facts.slot, i))
    members = tuple(_member(rank, i, standbys[i], "started") for rank, i in enumerate(chosen))
    reason = f"generation 0 starts with ranks {brief(range(world_size))}"
    return Roster(epoch, 0, members, _rest(standbys, chosen), reason)


def following(previous: Roster, survivors: Mapping[Incarnation, Facts], standbys: Standbys) -> Roster:
    """Return the roster after `previous`; `standbys` must be at least as many as the members that did not survive."""
    generation = previous.generation + 1
    gaps = [m for m in previous.members if m.incarnation not in survivors]
    taken = _fill(gaps, standbys)
    members: list[Member] = []
    for old in previous.members:
        if old.rank in taken:
            new = taken[old.rank]
            why = "spare" if standbys[new].generation < generation else "started"
            members.append(_member(old.rank, new, standbys[new], why))
        else:
            facts = survivors[old.incarnation]
            members.append(Member(old.rank, old.incarnation, facts.node, facts.slot, facts.fresh, "kept"))
    rest = _rest(standbys, taken.values())
    return Roster(previous.epoch, generation, tuple(members), rest, _reason(generation, gaps, members))


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


def _reason(generation: int, gaps: Sequence[Member], members: Sequence[Member]) -> str:
    kept = brief(m.rank for m in members if m.why == "kept")
    parts = [f"generation {generation}: ranks {kept} kept"]
    for gap in gaps:
        new = members[gap.rank]
        place = "the same node" if new.node == gap.node else f"node {new.node}, no standby was left on {gap.node}"
        parts.append(f"rank {gap.rank} to slot {new.slot} on {place} ({new.why})")
    return "; ".join(parts)
