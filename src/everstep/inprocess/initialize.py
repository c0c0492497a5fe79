"""`Initialize`: what each rank runs at the start of each iteration, the first included."""

import abc

from everstep.inprocess.exception import RestartAbort
from everstep.inprocess.state import FrozenState


class Initialize(abc.ABC):
    """Prepares an iteration. An Exception makes another iteration, a BaseException (`RestartAbort`) ends the job."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return `state`. Called on the thread of the wrapped call, before the health check."""
        ...


class RetryController(Initialize):
    """Ends the job when it has been tried often enough, or when too few ranks are left."""

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise RestartAbort, with the number that was reached and the one that was allowed."""
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(
                f"iteration {state.iteration} would begin, and RetryController(max_iterations={self.max_iterations}) "
                "allows no more"
            )
        for name, found, least in (
            ("world_size", state.world_size, self.min_world_size),
            ("active_world_size", state.active_world_size, self.min_active_world_size),
        ):
            if found is not None and found < least:
                raise RestartAbort(f"{name} is {found}, and RetryController(min_{name}={least}) wants at least {least}")
        return state

    def __repr__(self) -> str:
        return (
            f"RetryController(max_iterations={self.max_iterations}, min_world_size={self.min_world_size}, "
            f"min_active_world_size={self.min_active_world_size})"
        )
