"""The wrapped function under an agent: one generation after another, composed of the slices."""

import contextlib
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.clock import Clock
from everstep.events import Category, Event, SpanClosed, SpanOpened, StepValues
from everstep.inprocess.call import Assignment
from everstep.inprocess.interrupt import Interrupter
from everstep.process.page import Phase
from everstep.recovery.session import Session
from everstep.training.alone import NoKeeper, device_of
from everstep.training.parts import Faults, Keeper, NoFaults
from everstep.training.run import Run


class Ours:
    """What this process brings to its one wrapped call; also its `inprocess.call.Cleaner`."""

    def __init__(self, session: Session, backend: str) -> None:
        self._session, self._backend = session, backend
        self.interrupter = Interrupter()

    @contextlib.contextmanager
    def generation(self, assignment: Assignment) -> Generator[Run]:
        """Make this generation's groups and hand out its Run."""
        parts = MemberParts(self._session, self.interrupter, assignment, self._backend)
        parts.emit(SpanOpened(category=(Category.REBUILD if assignment.generation else Category.STARTUP).value))
        store = dist.TCPStore(*assignment.store, is_master=False, timeout=timedelta(seconds=600))
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"{assignment.epoch}/{assignment.generation}", store),
            rank=assignment.rank,
            world_size=assignment.world_size,
        )
        yield Run(
            parts,
            rank=assignment.rank,
            world_size=assignment.world_size,
            local_rank=assignment.rank,
            generation=assignment.generation,
        )

    def abort(self) -> None:
        """See `Cleaner.abort`."""

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """See `Cleaner.clean`."""
        if dist.is_initialized():
            dist.destroy_process_group()
        return ()

    def close(self) -> None:
        """The call is over: take the groups down."""
        if dist.is_initialized():
            dist.destroy_process_group()


class MemberParts:
    """Implements `Parts` over a session."""

    def __init__(self, session: Session, interrupter: Interrupter, assignment: Assignment, backend: str) -> None:
        self._session, self._interrupter, self._assignment = session, interrupter, assignment
        self.rank = assignment.rank
        self.device: torch.device = device_of(backend, assignment.rank)
        self.clock: Clock = session.clock
        self.keeper: Keeper = NoKeeper()
        self.phase = Phase.FIRST
        self.last_values: dict[str, float] = {}
        self._setup = True

    def emit(self, event: Event, *, at_s: float | None = None) -> None:
        """See `Parts.emit`."""
        self._session.telemetry.emit(event, at_s=at_s)

    def late(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """See `Parts.late`."""
        del seconds
        self.emit(StepValues(step=step, values=values))

    def close_setup(self) -> None:
        """See `Parts.close_setup`."""
        category = Category.REBUILD if self._assignment.generation else Category.STARTUP
        self.emit(SpanClosed(category=category.value))

    def arm_faults(self, total: int, state: Mapping[str, Any]) -> Faults:
        """See `Parts.arm_faults`."""
        return NoFaults()

    def page_step(self, step: int) -> None:
        """See `Parts.page_step`."""
        self.phase = Phase.STEP
        self._session.page.step_done(step, self.clock.now())

    def enter_phase(self, phase: int, limit_s: float = 0.0) -> None:
        """See `Parts.enter_phase`."""
        self.phase = phase
        self._session.page.phase(phase, self.clock.now(), limit_s)

    def mark(self) -> None:
        """See `Parts.mark`."""
        self._session.page.mark(self.clock.now())

    def show(self, step: int, total: int) -> None:
        """See `Parts.show`."""
        self._session.send({"kind": "progress.step", "step": step, "total": total, "values": self.last_values})

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """See `Parts.atomic`."""
        return self._interrupter.atomic()
