"""What a wrapped call is made of in this process: the slices, composed; with an agent, and without one."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from everstep.clock import Clock
from everstep.events import Event


@dataclass(frozen=True, slots=True)
class Asked:
    """What the script says of its state and where it is written; None where it leaves that to whoever starts it."""

    checkpoint_dir: str | None = None
    checkpoint_interval: int | None = None
    checkpoint_local_dir: str | None = None
    checkpoint_local_interval: int | None = None
    allow_pickle: bool = False  # what its state holds beside plain values may be pickled, and unpickled


class Faults(Protocol):
    """The injector, as the loop sees it."""

    def at_boundary(self, step: int) -> None:
        """`step` is about to begin."""
        ...

    def detach(self) -> None:
        """Leave nothing behind."""
        ...


class Keeper(Protocol):
    """Keeps the state of this rank: restores it, takes it after every step."""

    @property
    def epochs(self) -> Any:
        """How many passes over the loader are behind us."""
        ...

    def open(self, state: Mapping[str, Any], loader: Any, asked: Asked) -> None:
        """Say what the state is, and where it shall go; refuses what cannot be saved, by its key."""
        ...

    def restore(self, total: int) -> int:
        """Bring back the newest state that all ranks can; return the last step done in it, 0 for a start.

        `total`: the steps that the whole job has.
        """
        ...

    def restore_randomness(self) -> None:
        """The random generators, after everything that draws at construction (B3)."""
        ...

    def take(self, step: int) -> int:
        """`step` is done: keep its state. Return the bytes that were copied to memory; 0 where nothing is kept."""
        ...

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """What was logged at `step`, as soon as it is known: by it the best checkpoints are kept."""
        ...

    def finish(self, step: int) -> None:
        """The last step is done."""
        ...


class NoFaults:
    """Nothing is injected."""

    def at_boundary(self, step: int) -> None:
        """See `Faults.at_boundary`."""

    def detach(self) -> None:
        """See `Faults.detach`."""


class Parts(Protocol):
    """What `Run` and its loop need of this process."""

    rank: int
    device: torch.device
    clock: Clock
    phase: int
    last_values: dict[str, float]

    @property
    def keeper(self) -> Keeper:
        """Keeps the state of this rank."""
        ...

    def emit(self, event: Event, *, at_s: float | None = None) -> None:
        """Append to this process's ledger."""
        ...

    def emit_all(self, timed: Sequence[tuple[Event, float | None]]) -> None:
        """The same for events that are told together, each with its time."""
        ...

    def late(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """The values of an earlier step have come from the device."""
        ...

    def close_setup(self) -> None:
        """The user's own set-up is over: the loop begins."""
        ...

    def arm_faults(self, total: int, state: Mapping[str, Any]) -> Faults:
        """Return the injector of this generation."""
        ...

    def shielded(self) -> contextlib.AbstractContextManager[None]:
        """Entered around the loop: signals that are meant for whoever leads the job do not end this process."""
        ...

    def before_step(self, step: int) -> None:
        """`step` is next. Raises JobDrained where the job ends before it."""
        ...

    def page_step(self, step: int) -> None:
        """Say on the page that `step` is done."""
        ...

    def page_resumed(self, step: int) -> None:
        """Say on the page that this generation goes on after `step`."""
        ...

    def enter_phase(self, phase: int, limit_s: float = 0.0, name: str = "") -> None:
        """Say on the page what is done from here on."""
        ...

    def mark(self) -> None:
        """A sign of progress."""
        ...

    def show_begun(self, step: int, total: int) -> None:
        """Tell whoever watches that the loop begins after `step`."""
        ...

    def show(self, step: int, seconds: float) -> None:
        """Tell whoever watches how far this job is: `step` took that long."""
        ...

    def show_new(self, step: int, at_s: float) -> None:
        """`step` was done: tell whoever waits for the first new one after a fault, where it is that."""
        ...

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A section that is not interrupted."""
        ...
