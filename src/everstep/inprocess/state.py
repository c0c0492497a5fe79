"""What a callback is told of its rank: NVRx's `State`, `FrozenState` and `Mode`.

`rank` and `world_size` count every process that takes part; `active_rank` and `active_world_size` only those that run
the function, and stand in RANK and WORLD_SIZE while it runs.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, fields

from everstep import environ


class Mode(enum.Enum):
    """What a rank does in one iteration."""

    INITIALIZED = enum.auto()  # no assignment has been made yet
    ACTIVE = enum.auto()  # runs the function
    INACTIVE = enum.auto()  # in reserve: waits for the others, and for the next iteration
    TERMINATED = enum.auto()  # takes part no more


@dataclass(frozen=True)
class FrozenState:
    """A `State` as callbacks get it: nothing of it can be set."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None
    """What the function raised on this rank in the attempt that is being left; the object itself, never a copy."""


@dataclass
class State:
    """One rank's place, from iteration to iteration. For the thread of the wrapped call."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    @classmethod
    def from_env(cls) -> "State":
        """Read RANK and WORLD_SIZE; a world of one where no launcher's variable is set.

        Raises ConfigurationError where a launcher shows itself but RANK is missing: never a second rank 0.
        """
        where = environ.placement()
        return cls(where.rank, where.world_size, initial_rank=where.rank, initial_world_size=where.world_size)

    def set_distributed_vars(self) -> None:
        """Write RANK and WORLD_SIZE for the function; an inactive rank, which does not run it, keeps what it has."""
        if self.active_rank is not None:
            environ.update({"RANK": str(self.active_rank), "WORLD_SIZE": str(self.active_world_size)})

    def advance(self) -> None:
        """The next iteration begins: what the function raised in the last one is forgotten."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """Return what callbacks get."""
        return FrozenState(**{f.name: getattr(self, f.name) for f in fields(self)})

    def copy_from(self, other: "State | FrozenState", fields: Iterable[str] | None = None) -> None:
        """Take over the named fields of `other`, or all."""
        for name in fields if fields is not None else self.__dataclass_fields__:
            setattr(self, name, getattr(other, name))
