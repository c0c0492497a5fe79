"""The last save of a completed job: the newest step that every rank holds in memory, of one lineage.

Rule 1: what the last generation sealed on all ranks comes first. Rule 2: where it sealed nothing whole (it had nothing
left to do), what it began from, if that was in memory. Snapshots of two lineages are never combined.
"""

from collections import defaultdict
from collections.abc import Iterable

from everstep.checkpoint.core.plan import Plan, Sealed


def newest_common(
    world_size: int, sealed: Iterable[Sealed], epoch: int, generation: int, began: Plan | None
) -> tuple[Sealed, ...]:
    """Return one snapshot of each rank, in order of ranks; nothing where memory holds no whole step."""
    by_step: defaultdict[tuple[int, int, int], dict[int, Sealed]] = defaultdict(dict)
    for snapshot in sealed:
        if snapshot.world_size == world_size:
            by_step[snapshot.epoch, snapshot.generation, snapshot.step][snapshot.rank] = snapshot
    whole = {key: ranks for key, ranks in by_step.items() if len(ranks) == world_size}
    mine = [key for key in whole if key[:2] == (epoch, generation)]
    if not mine and began is not None:
        sources = began.sources
        mine = [
            key for key, ranks in whole.items()
            if key[2] == began.step and {r: s.buffer for r, s in ranks.items()} == dict(sources)
        ]  # fmt: skip
    if not mine:
        return ()
    ranks = whole[max(mine)]
    return tuple(ranks[rank] for rank in sorted(ranks))
