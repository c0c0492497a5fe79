"""The wrapped function without an agent of ours: under plain torchrun, srun, by hand, or in a script of one process.

Its ranks recover together all the same (`inprocess.peers`), and each process's watcher keeps its snapshots: a fault
that leaves all processes alive costs at most a step. There is no slower tier, and no ledger. A script that has made its
default group before the call runs once, and a fault ends it as it ends any script.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from everstep import environ
from everstep.checkpoint.core.budget import bytes_of
from everstep.checkpoint.intent_client import Disks
from everstep.checkpoint.snapshot import Snapshotter
from everstep.clock import SYSTEM, Clock
from everstep.environ import Placement
from everstep.errors import ConfigurationError, MemoryShortage
from everstep.events import Event
from everstep.inprocess.assignment import Assignment
from everstep.inprocess.call import Caller
from everstep.inprocess.cleaning import Cleaning
from everstep.inprocess.function import in_this_process
from everstep.inprocess.interrupt import Interrupter
from everstep.inprocess.peers import PeerSession, Rider, open_peers
from everstep.process.page import Phase
from everstep.telemetry import say
from everstep.training import keeper as keepers
from everstep.training.keeper import CannotBeKept
from everstep.training.loop import Epochs
from everstep.training.parts import Asked, Faults, Keeper, NoFaults
from everstep.training.run import Run

T = TypeVar("T")
CAP = "EVERSTEP_SNAPSHOT_MEMORY"
"""The most that the snapshots of one node may take, as `--snapshot-memory` of `everstep run`."""
_SHELF = "everstep.checkpoint.peer_shelf:make"


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
    """Nothing is kept: this function runs once."""

    def __init__(self) -> None:
        self.epochs = Epochs()

    def open(self, state: Mapping[str, Any], loader: Any, asked: Asked) -> None:
        """See `Keeper.open`."""
        del state, loader
        if _wants_a_disk(asked):
            say(_NO_DISK)

    def restore(self, total: int) -> int:
        """See `Keeper.restore`."""
        del total
        return 0

    def restore_randomness(self) -> None:
        """See `Keeper.restore_randomness`."""

    def take(self, step: int) -> int:
        """See `Keeper.take`."""
        del step
        return 0

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """See `Keeper.measured`."""

    def finish(self, step: int) -> None:
        """See `Keeper.finish`."""


class AloneKeeper(keepers.Keeper):
    """One generation's keeper: snapshots in memory, for as long as this process lives; no slower tier."""

    _keeps = False

    def open(self, state: Mapping[str, Any], loader: Any, asked: Asked) -> None:
        """See `Keeper.open`. What cannot be kept trains all the same, and a fault begins at step 1 again."""
        try:
            super().open(state, loader, asked)
        except (CannotBeKept, MemoryShortage) as error:
            if self._told.get("restore") is not None:  # the others go on from there
                raise
            if self._generation == 0:
                say(f"rank {self._rank}: no snapshots are taken, a fault begins at step 1 again: {error}")
        else:
            self._keeps = True

    def _check_disks(self, asked: Asked) -> None:
        """There is nobody who could write there."""
        if _wants_a_disk(asked) and self._rank == 0 and self._generation == 0:
            say(_NO_DISK)

    def restore(self, total: int) -> int:
        """See `Keeper.restore`."""
        step = super().restore(total) if self._keeps else 0
        if self._generation and self._rank == 0:
            say(f"generation {self._generation} goes on with step {step + 1}: {self._told.get('reason', '')}")
        return step

    def take(self, step: int) -> int:
        """See `Keeper.take`."""
        return super().take(step) if self._keeps else 0


def _wants_a_disk(asked: Asked) -> bool:
    return asked.checkpoint_dir is not None or asked.checkpoint_local_dir is not None


_NO_DISK = "checkpoint_dir is ignored: checkpoints are written by the agent; start the script with `everstep run`"


class AloneParts:
    """Implements `Parts` with nobody to tell but the watcher's page, and without peers not even that."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        session: PeerSession | None = None,
        generation: int = 0,
        keeper: Keeper | None = None,
    ) -> None:
        self.rank, self.device = rank, device
        self._session, self._generation = session, generation
        self.interrupter: Interrupter | None = None
        self.clock: Clock = SYSTEM
        self.keeper: Keeper = keeper or NoKeeper()
        self.phase = Phase.FIRST
        self.last_values: dict[str, float] = {}

    def emit(self, event: Event, *, at_s: float | None = None) -> None:
        """See `Parts.emit`."""
        if self._session is not None:
            self._session.telemetry.emit(event, at_s=at_s)

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

    def shielded(self) -> contextlib.AbstractContextManager[None]:
        """See `Parts.shielded`: nobody leads this job."""
        return contextlib.nullcontext()

    def before_step(self, step: int) -> None:
        """See `Parts.before_step`: a signal reaches the script itself."""
        del step

    def page_step(self, step: int) -> None:
        """See `Parts.page_step`."""
        self.phase = Phase.STEP
        if self._session is not None:
            self._session.page.step_done(step, self.clock.now())

    def page_resumed(self, step: int) -> None:
        """See `Parts.page_resumed`."""
        if self._session is not None:
            self._session.page.resumed(step, self.clock.now())

    def enter_phase(self, phase: int, limit_s: float = 0.0, name: str = "") -> None:
        """See `Parts.enter_phase`. A loop that is left late says nothing of the next generation."""
        self.phase = phase
        if self._session is not None and self._session.page.generation == self._generation:
            self._session.page.phase(phase, self.clock.now(), limit_s, name)

    def mark(self) -> None:
        """See `Parts.mark`."""
        if self._session is not None:
            self._session.page.mark(self.clock.now())

    def show_begun(self, step: int, total: int) -> None:
        """See `Parts.show_begun`."""

    def show(self, step: int, seconds: float) -> None:
        """See `Parts.show`."""

    def show_new(self, step: int, at_s: float) -> None:
        """See `Parts.show_new`."""

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """See `Parts.atomic`."""
        return self.interrupter.atomic() if self.interrupter is not None else contextlib.nullcontext()


class Ours:
    """What this process brings to a wrapped call of peers; also its `inprocess.call.Cleaner`."""

    def __init__(self, session: PeerSession, backend: str, where: Placement) -> None:
        self._session, self._backend, self._where = session, backend, where
        self.interrupter = Interrupter()
        self._snapshotter = Snapshotter(session.send, clock=session.clock)
        self._disks = Disks(session.send)
        self._cleaning = Cleaning(clock=session.clock)
        session.on("snapshot", self._snapshotter.on_message)

    @contextlib.contextmanager
    def generation(self, assignment: Assignment) -> Generator[Run]:
        """Make this generation's group and hand out its Run. The device stays where the launcher has put it."""
        session, rank, local = self._session, assignment.rank, self._where.local_rank
        self._snapshotter.begin(rank, assignment.world_size, assignment.companions["snapshot"])
        keeper = AloneKeeper(assignment, self._snapshotter, self._disks, session.telemetry, session.clock)
        with self._cleaning.meeting.entered(assignment):
            self._cleaning.meeting.init_process_group(self._backend)
            device = device_of(self._backend, local)
            parts = AloneParts(rank, device, session, assignment.generation, keeper)
            parts.interrupter = self.interrupter
            yield Run(
                parts, rank=rank, world_size=assignment.world_size, local_rank=local, generation=assignment.generation
            )  # fmt: skip
            self._snapshotter.settle()  # whole before this rank says that it has completed

    def begin(self) -> None:
        """See `Cleaner.begin`."""
        self._cleaning.begin()

    def abort(self) -> None:
        """See `Cleaner.abort`."""
        self._cleaning.abort()

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """See `Cleaner.clean`."""
        self._snapshotter.settle()
        return self._cleaning.clean(error)

    def tick(self) -> None:
        """See `Cleaner.tick`: seal what the device has copied."""
        self._snapshotter.poll()

    def close(self) -> None:
        """The call is over: take the groups down."""
        self._cleaning.close()
        self._snapshotter.close()


def call(function: Callable[[Run], T], backend: str, where: Placement) -> T:
    """Run `function` in the world that the launcher's variables describe, or in a world of one."""
    if dist.is_initialized():
        return _once(function, backend, where)
    with open_peers(where=where, rider=_rider(where)) as session:
        ours = Ours(session, backend, where)

        def body(assignment: Assignment) -> T:
            with ours.generation(assignment) as run:
                return in_this_process(lambda: function(run))

        try:
            return Caller(session).call(body, ours.interrupter, ours)
        finally:
            ours.close()


def _rider(where: Placement) -> Rider:
    """What keeps this rank's snapshots, beside its watcher. Raises UsageError for a cap that is no amount."""
    cap = environ.get(CAP)
    return Rider(_SHELF, {"neighbours": where.local_world_size, "cap_bytes": None if cap is None else bytes_of(cap)})


def _once(function: Callable[[Run], T], backend: str, where: Placement) -> T:
    """The script has made its own group: it can be neither left nor made anew."""
    if where.rank == 0:
        say(
            "the default process group was made before the wrapped call, so a fault ends this job; make it inside the "
            "function, or leave it out, to have faults survived"
        )
    parts = AloneParts(where.rank, device_of(backend, where.local_rank))
    return function(
        Run(parts, rank=where.rank, world_size=where.world_size, local_rank=where.local_rank, generation=0)
    )  # fmt: skip
