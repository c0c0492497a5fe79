"""The wrapped function without an agent: it runs once, and a fault ends it as it ends any script."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from everstep.clock import SYSTEM, Clock
from everstep.environ import Placement
from everstep.errors import ConfigurationError
from everstep.events import Event
from everstep.process.page import Phase
from everstep.telemetry import say
from everstep.training.loop import Epochs
from everstep.training.parts import Faults, Keeper, NoFaults
from everstep.training.run import Run

T = TypeVar("T")


def device_of(backend: str, local_rank: int) -> torch.device:
    """Return the device that `backend` works on, and make it the current one. Over gloo ranks may share one."""
    if "nccl" not in backend and "cuda" not in backend:
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if "nccl" in backend and local_rank >= found:
        raise ConfigurationError(
            f"local rank {local_rank} has no GPU of its own: this node has {found}. Start at most {found} ranks here, "
            'or let ranks share one over gloo: @everstep.resilient(backend="cpu:gloo,cuda:gloo").'
        )
    device = torch.device("cuda", local_rank % max(found, 1))
    torch.cuda.set_device(device)
    return device


class NoKeeper:
    """Nothing is kept: there is no agent to keep it."""

    def __init__(self) -> None:
        self.epochs = Epochs()

    def open(
        self, state: Mapping[str, Any], loader: Any, checkpoint_dir: str | None, checkpoint_interval: int | None
    ) -> None:
        """See `Keeper.open`."""
        del state, loader, checkpoint_interval
        if checkpoint_dir is not None:
            say("checkpoint_dir is ignored: checkpoints are written by the agent; start the script with `everstep run`")

    def restore(self) -> int:
        """See `Keeper.restore`."""
        return 0

    def restore_randomness(self) -> None:
        """See `Keeper.restore_randomness`."""

    def take(self, step: int) -> None:
        """See `Keeper.take`."""

    def finish(self, step: int) -> None:
        """See `Keeper.finish`."""


class AloneParts:
    """Implements `Parts` with nobody to tell."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.clock: Clock = SYSTEM
        self.keeper: Keeper = NoKeeper()
        self.phase = Phase.FIRST
        self.last_values: dict[str, float] = {}

    def emit(self, event: Event, *, at_s: float | None = None) -> None:
        """See `Parts.emit`."""

    def emit_all(self, timed: Sequence[tuple[Event, float | None]]) -> None:
        """See `Parts.emit_all`."""
        for event, at_s in timed:
            self.emit(event, at_s=at_s)

    def late(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """See `Parts.late`."""

    def close_setup(self) -> None:
        """See `Parts.close_setup`."""

    def arm_faults(self, total: int, state: Mapping[str, Any]) -> Faults:
        """See `Parts.arm_faults`."""
        del total, state
        return NoFaults()

    def page_step(self, step: int) -> None:
        """See `Parts.page_step`."""

    def page_resumed(self, step: int) -> None:
        """See `Parts.page_resumed`."""

    def enter_phase(self, phase: int, limit_s: float = 0.0, name: str = "") -> None:
        """See `Parts.enter_phase`."""

    def mark(self) -> None:
        """See `Parts.mark`."""

    def show(self, step: int, total: int) -> None:
        """See `Parts.show`."""

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """See `Parts.atomic`."""
        return contextlib.nullcontext()


def call(function: Callable[[Run], T], backend: str, where: Placement) -> T:
    """Run `function` in the world that the launcher's variables describe, or in a world of one."""
    if not where.launched:
        say("no launcher's variable is set: a world of one rank; `everstep run` starts more and keeps them going")
    elif where.rank == 0:
        say("no everstep agent: a fault ends this job; start it with `everstep run` to have it survived")
    with _group(backend, where):
        parts = AloneParts(where.rank, device_of(backend, where.local_rank))
        run = Run(
            parts, rank=where.rank, world_size=where.world_size, local_rank=where.local_rank, generation=0
        )  # fmt: skip
        return function(run)


@contextlib.contextmanager
def _group(backend: str, where: Placement) -> Generator[None]:
    if dist.is_initialized():  # the script has made its own
        yield
        return
    if where.launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
