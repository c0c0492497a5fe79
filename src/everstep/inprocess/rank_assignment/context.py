"""What every rank assignment takes and returns."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from everstep.inprocess.exception import RestartError
from everstep.inprocess.state import State

KeyOrFn = str | Callable[[State], str]
"""A key that is the same on every rank, or a function from this rank's state to its key (a host's name)."""

EXCHANGE_TIMEOUT = timedelta(seconds=60)


class RankDiscarded(RestartError):
    """This rank has no place in the next iteration; the message says which ranks have none, and by which rule."""


class Exchange(Protocol):
    """What an assignment needs of a store; `everstep.inprocess.store.StoreMixin` is one."""

    def exchange(self, name: str, rank: int, text: str, ranks: Sequence[int], timeout: timedelta) -> dict[int, str]:
        """Say `text` under `name`; return what each of `ranks` says there, this one included."""
        ...


@dataclass
class RankAssignmentCtx:
    """One rank's state before the assignment, and after it; who is lost (numbered as in `state.rank`)."""

    state: State
    store: Exchange
    terminated_ranks: set[int]


class RankAssignment(abc.ABC):
    """Gives ranks to those that are left. Every rank runs it at the same time, and all must come to one answer."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank's new state. Raises RankDiscarded where this rank has no place."""
        ...


class RankFilter(RankAssignment):
    """Chooses who is active; listed before an assignment, since what is listed last runs first."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return `ctx` with this rank's mode and active rank."""
        ...


def key_of(key_or_fn: KeyOrFn, state: State) -> str:
    """Return this rank's key."""
    return key_or_fn if isinstance(key_or_fn, str) else str(key_or_fn(state))


def remaining(ctx: RankAssignmentCtx) -> list[int]:
    """Return the ranks of the world that are not lost, in order."""
    return [rank for rank in range(ctx.state.world_size) if rank not in ctx.terminated_ranks]
