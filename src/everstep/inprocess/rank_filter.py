"""`rank_filter` of NVRx 0.4.1, which its later versions dropped for `rank_assignment`: filters on a `State` alone."""

import abc
import warnings
from dataclasses import replace
from typing import Any

from everstep.inprocess.state import Mode, State


class RankFilter(abc.ABC):
    """Chooses who is active among the ranks of a world that has been assigned."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Return this rank's state with its mode and active rank."""
        ...


class MaxActiveWorldSize(RankFilter):
    """At most so many run the function. None: all."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        """See `RankFilter.__call__`."""
        most = _so_far(state)
        return _activated(state, most if self.max_active_world_size is None else min(self.max_active_world_size, most))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """As many run the function as `divisor` divides."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        """See `RankFilter.__call__`."""
        return _activated(state, _so_far(state) // self.divisor * self.divisor)


class WorldSizeDivisibleBy(ActiveWorldSizeDivisibleBy):
    """The older name of `ActiveWorldSizeDivisibleBy`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn("WorldSizeDivisibleBy is ActiveWorldSizeDivisibleBy now", DeprecationWarning, stacklevel=2)
        super().__init__(*args, **kwargs)


def _so_far(state: State) -> int:
    return state.world_size if state.active_world_size is None else min(state.active_world_size, state.world_size)


def _activated(state: State, size: int) -> State:
    active = state.rank is not None and state.rank < size
    return replace(
        state,
        active_rank=state.rank if active else None,
        active_world_size=size,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
    )
