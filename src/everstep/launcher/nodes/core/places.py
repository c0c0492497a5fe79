"""Which place a rank has on its node: LOCAL_RANK, and how many there are.

Rule 1: who goes on keeps its place, for a device is bound to it; a newcomer takes the lowest that is free.
Rule 2: where the world has become smaller the places of a node are numbered anew, in the order of its ranks.
"""

from collections.abc import Iterable, Mapping

from everstep.recovery.core.words import Incarnation, Member


def places(members: Iterable[Member], before: Mapping[Incarnation, int], *, smaller: bool) -> dict[Incarnation, int]:
    """Return the place of each of one node's members; `before`: those of the last roster."""
    ordered = sorted(members, key=lambda member: member.rank)
    if smaller:
        return {member.incarnation: place for place, member in enumerate(ordered)}
    found = {m.incarnation: before[m.incarnation] for m in ordered if m.incarnation in before}
    free = iter(sorted(set(range(len(ordered) + len(before))) - set(found.values())))
    return {m.incarnation: found[m.incarnation] if m.incarnation in found else next(free) for m in ordered}
