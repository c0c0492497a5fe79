"""What nodes tell one another of what they keep before a generation begins, and what follows from all of it.

Rule 1: facts are read when they come: what cannot be read never counts as told, so nothing of it can go wrong where it
is decided.
Rule 2: the same from the same, wherever it is concluded.
Rule 3: a checkpoint of a slower tier counts when any node knows that it is committed: words about it may be on their
way while nodes tell. The word of rank 0's node stands first; what any node has struck out counts for none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.core.copies import Copy, Decision, Place, Version, agreed, decide, keepers, merged, version_of
from everstep.checkpoint.core.placement import Placement
from everstep.checkpoint.core.plan import Branch, Committed

Facts = Mapping[str, Any]
"""What one node has told: `copies`, `branches`, `counted`, `struck`, `struck_older`, `older`, `room`."""


def facts(
    copies: Iterable[Copy],
    branches: Iterable[Branch],
    counted: Version | None,
    struck: Iterable[Place],
    struck_older: Iterable[tuple[str, int]],
    older: Iterable[Committed],
    room: int,
) -> Facts:
    """Write down what one node knows: whole copies that lie here, oldest first, and what was found damaged.

    `room`: bytes of snapshots that may be brought here.
    """
    return {
        "copies": [copy.to_row() for copy in copies],
        "branches": [[b.epoch, b.generation, b.parent] for b in branches],
        "counted": counted,
        "struck": [list(place) for place in sorted(struck)],
        "struck_older": [list(one) for one in sorted(struck_older)],
        "older": [[one.step, one.tier, dict(one.where), one.world_size] for one in older],
        "room": room,
    }


def checked(node: str, told: Facts) -> Facts:
    """Return what a node has told. Raises LookupError, TypeError or ValueError where it cannot be read."""
    for row in told["copies"]:
        Copy.from_row(node, row)
    for one in told["struck"]:
        Place(*one)
    merged([told["branches"]])
    version_of(told["counted"])
    _older(told)
    int(told["room"])
    _ = [(str(tier), int(step)) for tier, step in told["struck_older"]]
    return told


@dataclass(frozen=True, slots=True)
class Conclusion:
    """From what a generation begins, and what is known with it."""

    decision: Decision
    branches: list[Branch]  # generations so far, of which any node knows
    counted: Version | None  # the save of the peer tier that counts where the generation begins
    keepers: Placement  # who has replicas of whom


def conclude(told: Mapping[str, Facts], homes: Mapping[int, str], leader: str, epoch: int, number: int) -> Conclusion:
    """Conclude from what these nodes have told, for a generation whose ranks stand on the nodes `homes`.

    `leader`: the node of rank 0. What was told has been `checked`.
    """
    branches = merged(one["branches"] for one in told.values())
    struck = frozenset(Place(*place) for one in told.values() for place in one["struck"])
    copies = [Copy.from_row(node, row) for node, one in sorted(told.items()) for row in one["copies"]]
    room = {node: int(one["room"]) for node, one in told.items()}
    decision = decide(homes, copies, branches, _of_slower_tiers(told, leader), struck, room)
    begun = [*branches, Branch(epoch, number, decision.plan.parent)]
    counted = agreed([version_of(one["counted"]) for one in told.values()], begun)
    return Conclusion(decision, branches, counted, keepers(copies))


def _of_slower_tiers(told: Mapping[str, Facts], leader: str) -> list[Committed]:
    gone = {(str(tier), int(step)) for one in told.values() for tier, step in one["struck_older"]}
    first: dict[tuple[str, int], Committed] = {}
    for node in sorted(told, key=lambda name: (name != leader, name)):
        for one in _older(told[node]):
            first.setdefault((one.tier, one.step), one)
    return [one for known, one in first.items() if known not in gone]


def _older(told: Facts) -> Sequence[Committed]:
    return [Committed(int(step), str(tier), dict(where), world) for step, tier, where, world in told["older"]]
