"""A save whose coordinator is gone: what its successor does with it.

It decides when every node that is left has said how the save stands there.

Rule 1: what any node has heard of its end is its end.
Rule 2: where every rank's fragment is here, it is merged again: that is a pure function, and publishing it twice does
no harm (EXPERIMENTS C5).
Rule 3: else a rank whose node is gone and whose fragment is not here ends it: its shard may be whole or not, nobody
knows. Where all ranks have staged and the missing ones live, they are asked to write again.
Rule 4: what not every rank has staged is void; nothing of it was written.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

from everstep.checkpoint.core.commit import Phase, Save


@dataclass(frozen=True, slots=True)
class Standing:
    """How a save stands on one node."""

    save: str  # the token of the one that is open there; empty: none
    world_size: int = 0  # of that save
    staged: frozenset[int] = frozenset()  # of its own ranks
    ended: tuple[str, str] = ("", "")  # the last save whose end it has heard of, and how that ended

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "staged": sorted(self.staged)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Standing":
        """Read what `to_json` returned; ValueError, KeyError or TypeError for anything else."""
        token, phase = body["ended"]
        staged = frozenset(int(rank) for rank in body["staged"])
        return cls(str(body["save"]), int(body["world_size"]), staged, (str(token), str(phase)))


def resume(save: Save, standings: Iterable[Standing], reported: Mapping[int, int], living: Set[int]) -> Save:
    """Return the save as the successor takes it up. `reported`: bytes by rank, of fragments that are here.

    `living`: ranks whose nodes are here.
    """
    told = list(standings)
    for one in told:
        if one.ended[0] == save.token:
            return replace(save, phase=Phase(one.ended[1]), text="its end was told by the coordinator before it went")
    staged = frozenset(rank for one in told if one.save == save.token for rank in one.staged) | frozenset(reported)
    save = replace(save, staged=staged, written=dict(reported))
    everyone = frozenset(range(save.world_size))
    if everyone <= reported.keys():
        return replace(save, phase=Phase.MERGING)
    if staged != everyone:
        return replace(save, phase=Phase.VOID, text="its coordinator went before every rank had come to it")
    missing = everyone - reported.keys() - living
    if missing:
        return replace(save, phase=Phase.FAILED, text=f"rank {min(missing)}: its node went before it was written")
    return replace(save, phase=Phase.WRITING)
