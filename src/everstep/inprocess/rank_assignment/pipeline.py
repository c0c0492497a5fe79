"""Assignments and filters without a topology: pure but for the one exchange of `FilterCountGroupedByKey`."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from everstep.inprocess.rank_assignment.context import (
    EXCHANGE_TIMEOUT,
    KeyOrFn,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    key_of,
    remaining,
)
from everstep.inprocess.state import Mode, State
from everstep.ranks import brief


class ActivateAllRanks(RankFilter):
    """Everybody runs the function."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankFilter.__call__`."""
        return activated(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """At most so many run the function; ranks above wait in reserve. None: all."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankFilter.__call__`."""
        most = _so_far(ctx.state)
        return activated(ctx, most if self.max_active_world_size is None else min(self.max_active_world_size, most))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """As many run the function as `divisor` divides; the rest wait in reserve."""

    def __init__(self, divisor: int = 1) -> None:
        if divisor < 1:
            raise ValueError(f"ActiveWorldSizeDivisibleBy(divisor={divisor}): give 1 or more.")
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankFilter.__call__`."""
        return activated(ctx, _so_far(ctx.state) // self.divisor * self.divisor)


class ShiftRanks(RankAssignment):
    """Ranks move down over the gaps and keep their order."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankAssignment.__call__`."""
        left = remaining(ctx)
        return _moved(ctx, {old: new for new, old in enumerate(left)})


class FillGaps(RankAssignment):
    """Only as many move as there are gaps: the highest ranks, into the gaps below the new world size."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankAssignment.__call__`."""
        left = remaining(ctx)
        gaps = iter([rank for rank in range(len(left)) if rank in ctx.terminated_ranks])
        return _moved(ctx, {old: old if old < len(left) else next(gaps) for old in left})


class FilterCountGroupedByKey(RankAssignment):
    """Counts the ranks left in each group (a node); where `condition(count)` fails, the whole group is lost.

    Listed after an assignment, which then closes the gaps. One exchange of keys, and no barrier.
    """

    def __init__(
        self, key_or_fn: KeyOrFn, condition: Callable[[int], bool], timeout: timedelta = EXCHANGE_TIMEOUT
    ) -> None:
        self.key_or_fn, self.condition, self.timeout = key_or_fn, condition, timeout

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """See `RankAssignment.__call__`."""
        rank, left = ctx.state.rank, remaining(ctx)
        if rank is None or rank not in left:
            raise discarded(ctx)
        mine = json.dumps(key_of(self.key_or_fn, ctx.state))
        keys = {r: json.loads(text) for r, text in ctx.store.exchange("group", rank, mine, left, self.timeout).items()}
        counts = Counter(keys.values())
        failing = {key for key, count in counts.items() if not self.condition(count)}
        ctx.terminated_ranks = ctx.terminated_ranks | {r for r, key in keys.items() if key in failing}
        return ctx


def activated(ctx: RankAssignmentCtx, active_world_size: int) -> RankAssignmentCtx:
    """Have the lowest ranks run the function, and the others wait."""
    rank = ctx.state.rank
    active = rank is not None and rank < active_world_size
    ctx.state = replace(
        ctx.state,
        active_rank=rank if active else None,
        active_world_size=active_world_size,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
    )
    return ctx


def discarded(ctx: RankAssignmentCtx, why: str = "it is lost, or its group is") -> RankDiscarded:
    """Say who is out, and why (W19)."""
    gone = brief(ctx.terminated_ranks)
    return RankDiscarded(
        f"rank {ctx.state.rank} of {ctx.state.world_size} has no place in the next iteration: {why} (out: ranks {gone})"
    )


def _so_far(state: State) -> int:
    """How many are active by what ran before in the same pipeline."""
    return state.world_size if state.active_world_size is None else min(state.active_world_size, state.world_size)


def _moved(ctx: RankAssignmentCtx, places: dict[int, int]) -> RankAssignmentCtx:
    rank, size = ctx.state.rank, len(places)
    if rank is None or rank not in places:
        raise discarded(ctx)
    ctx.state = replace(ctx.state, rank=places[rank], world_size=size, active_rank=places[rank], active_world_size=size)
    ctx.terminated_ranks = set()
    return ctx
