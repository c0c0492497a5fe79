"""The wrapped function under an agent: one generation after another, composed of the slices."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.intent_client import READERS, Disks
from everstep.checkpoint.reading_beside import Readers
from everstep.checkpoint.snapshot import Snapshotter
from everstep.clock import Clock
from everstep.events import Category, Event, Numerics, SpanClosed, SpanOpened, StepValues
from everstep.faults import hooks as faults
from everstep.faults.calls import Calls
from everstep.inprocess.assignment import Assignment
from everstep.inprocess.cleaning import Cleaning
from everstep.inprocess.interrupt import Interrupter
from everstep.process.page import Phase
from everstep.recovery.session import Session
from everstep.training import numerics
from everstep.training.alone import device_of
from everstep.training.boundary import Boundary
from everstep.training.keeper import Keeper
from everstep.training.parts import Faults, NoFaults
from everstep.training.run import Run
from everstep.training.shield import shielded


class Ours:
    """What this process brings to its one wrapped call; also its `inprocess.call.Cleaner`."""

    def __init__(self, session: Session, backend: str) -> None:
        self._session, self._backend = session, backend
        self.interrupter = Interrupter()
        self._snapshotter = Snapshotter(session.send, clock=session.clock)
        self._disks, self._readers = Disks(session.send), Readers(session.send)
        self._keeper: Keeper | None = None
        self._calls = Calls(session.send)
        self._cleaning = Cleaning(clock=session.clock)
        session.on("snapshot", self._snapshotter.on_message)
        for name in READERS:
            session.on(name, self._heard_disk)
        session.on("fault", self._heard_fault)
        self._boundary = Boundary(session.send)
        session.on("drain", self._heard_drain)

    def _heard_disk(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        if fds:
            self._readers.on_message(message, fds)
        else:
            self._disks.on_message(message)

    def _heard_fault(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        del fds  # none come
        self._calls.deliver(message)

    def _heard_drain(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        del fds  # none come
        self._boundary.heard(message)

    @contextlib.contextmanager
    def generation(self, assignment: Assignment) -> Generator[Run]:
        """Make this generation's groups and hand out its Run."""
        session, rank, world = self._session, assignment.rank, assignment.world_size
        self._snapshotter.begin(rank, world, assignment.companions.get("snapshot", {}))
        keeper = Keeper(
            assignment, self._snapshotter, self._disks, session.telemetry, session.clock, readers=self._readers
        )
        self._boundary.enter(assignment.generation)
        parts = MemberParts(session, self.interrupter, assignment, self._backend, keeper, self._calls, self._boundary)
        keeper.reading = parts.reading
        self._keeper = keeper
        with self._cleaning.meeting.entered(assignment):
            self._cleaning.meeting.init_process_group(self._backend)
            parts.open_setup()
            local = assignment.rank if assignment.local is None else assignment.local[0]
            yield Run(parts, rank=rank, world_size=world, local_rank=local, generation=assignment.generation)
            self._snapshotter.settle()  # whole before this rank says that it has completed

    def begin(self) -> None:
        """See `Cleaner.begin`."""
        self._cleaning.begin()

    def abort(self) -> None:
        """See `Cleaner.abort`: what is late is seen when the function does not leave, and the worker replaced."""
        self._cleaning.abort()

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """See `Cleaner.clean`."""
        self._snapshotter.settle()
        if self._keeper is not None:
            self._keeper.let_go()
        self._disks.rewound(0)  # intents of the next generation come after its assignment
        return self._cleaning.clean(error)

    def tick(self) -> None:
        """See `Cleaner.tick`: seal what the device has copied."""
        self._snapshotter.poll()

    def close(self) -> None:
        """The call is over: take the groups down."""
        self._cleaning.close()
        self._snapshotter.close()


class MemberParts:
    """Implements `Parts` over a session."""

    def __init__(
        self,
        session: Session,
        interrupter: Interrupter,
        assignment: Assignment,
        backend: str,
        keeper: Keeper,
        calls: Calls,
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self._session, self._interrupter, self._assignment, self._calls = session, interrupter, assignment, calls
        self.rank = assignment.rank
        self.device: torch.device = device_of(
            backend, assignment.rank if assignment.local is None else assignment.local[0]
        )
        self.clock: Clock = session.clock
        self.keeper = keeper
        self.phase = Phase.FIRST
        self.last_values: dict[str, float] = {}
        self._new_step: int | None = assignment.companions.get("progress", {}).get("new")
        self._setup = (Category.REBUILD if assignment.generation else Category.STARTUP).value

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """A directory is read, by way of another process: that ends each wait by itself, and none is a hang."""
        self.enter_phase(Phase.DECLARED, 0.0, "restore")
        try:
            yield
        finally:
            self.enter_phase(Phase.FIRST)

    def emit(self, event: Event, *, at_s: float | None = None) -> None:
        """See `Parts.emit`."""
        self._session.telemetry.emit(event, at_s=at_s)

    def emit_all(self, timed: Sequence[tuple[Event, float | None]]) -> None:
        """See `Parts.emit_all`."""
        self._session.telemetry.emit_all(timed)

    def late(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """See `Parts.late`."""
        del seconds
        self.emit(StepValues(step=step, values=values))

    def open_setup(self) -> None:
        """The user's function is about to be entered."""
        self.emit(SpanOpened(category=self._setup))

    def close_setup(self) -> None:
        """See `Parts.close_setup`."""
        self.emit(SpanClosed(category=self._setup))
        facts = numerics.facts()
        self.emit(Numerics(world_size=self._assignment.world_size, facts=facts))
        self._session.send({"kind": "numerics.here", "facts": facts})

    def arm_faults(self, total: int, state: Mapping[str, Any]) -> Faults:
        """See `Parts.arm_faults`."""
        told = self._assignment.companions.get("fault", {})
        hooks = faults.arm(told, self._calls.call, self.rank, total, self.emit)
        if hooks is None:
            return NoFaults()
        things = list(state.values())
        hooks.attach(
            [t for t in things if isinstance(t, torch.nn.Module)], [t for t in things if hasattr(t, "param_groups")]
        )
        return hooks

    def shielded(self) -> contextlib.AbstractContextManager[None]:
        """See `Parts.shielded`."""
        return shielded()

    def before_step(self, step: int) -> None:
        """See `Parts.before_step`."""
        self._boundary.before(step)

    def page_step(self, step: int) -> None:
        """See `Parts.page_step`."""
        self.phase = Phase.STEP
        self._session.page.step_done(step, self.clock.now())

    def page_resumed(self, step: int) -> None:
        """See `Parts.page_resumed`."""
        self._session.page.resumed(step, self.clock.now())

    def enter_phase(self, phase: int, limit_s: float = 0.0, name: str = "") -> None:
        """See `Parts.enter_phase`. A loop that is left late (its frames are dropped) says nothing of the next one."""
        self.phase = phase
        if self._session.page.generation == self._assignment.generation:
            self._session.page.phase(phase, self.clock.now(), limit_s, name)

    def mark(self) -> None:
        """See `Parts.mark`."""
        self._session.page.ping(self.clock.now())

    def show_begun(self, step: int, total: int) -> None:
        """See `Parts.show_begun`."""
        self._session.send({"kind": "progress.begun", "step": step, "total": total})

    def show(self, step: int, seconds: float) -> None:
        """See `Parts.show`."""
        self._session.send({"kind": "progress.step", "step": step, "seconds": seconds, "values": self.last_values})

    def show_new(self, step: int, at_s: float) -> None:
        """See `Parts.show_new`."""
        if self._new_step is not None and step >= self._new_step:
            self._new_step = None
            self._session.send({"kind": "progress.new", "step": step, "at_s": at_s})

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """See `Parts.atomic`."""
        return self._interrupter.atomic()
