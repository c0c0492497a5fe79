"""`Finalize`: what each rank runs after it has left the function, before the health check."""

import abc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from everstep.inprocess import bounded
from everstep.inprocess.exception import TimeoutError as CallbackTimeout
from everstep.inprocess.state import FrozenState


class Finalize(abc.ABC):
    """Cleans up what the function left. What it raises ends this rank: its process is replaced where that can be."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return `state`. Called on the thread of the wrapped call."""
        ...


class ThreadedFinalize(Finalize):
    """Calls `fn(*args, **kwargs)` in a thread, with a time limit. Works with and without CUDA."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.timeout, self.fn = timeout, fn
        self.args: tuple[Any, ...] = args or ()
        self.kwargs: dict[str, Any] = kwargs or {}

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise what `fn` raised, or `exception.TimeoutError` where it has not ended in time."""
        name = getattr(self.fn, "__name__", repr(self.fn))
        device = _current_device()  # a new thread would start on device 0
        outcome = bounded.run(f"finalize {name}", lambda: self._call(device), self.timeout.total_seconds())
        if outcome.late:
            raise CallbackTimeout(
                f"rank {state.rank}: ThreadedFinalize: {name} has not ended within {self.timeout}; give it more time, "
                "or have it wait for less"
            )
        if outcome.error is not None:
            raise outcome.error
        return state

    def _call(self, device: int | None) -> None:
        if device is not None:
            _set_device(device)
        self.fn(*self.args, **self.kwargs)


def _current_device() -> int | None:
    import torch  # noqa: PLC0415 - this module is light until something is finalized

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _set_device(device: int) -> None:
    import torch  # noqa: PLC0415 - see above

    torch.cuda.set_device(device)
