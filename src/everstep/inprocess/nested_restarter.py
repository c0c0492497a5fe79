"""Callbacks that tell an outer restarter how far this one is: lines `[NestedRestarter] name=[InProcess] state=…`.

They go to stdout through one logger, from one rank, so that whoever reads a job's log can follow both restarters.
"""

import logging
import sys
from dataclasses import dataclass

from everstep.inprocess.abort import Abort
from everstep.inprocess.completion import Completion
from everstep.inprocess.initialize import Initialize
from everstep.inprocess.state import FrozenState
from everstep.inprocess.terminate import Terminate


class NestedRestarterLogger(logging.Logger):
    """Writes to the present stdout, whatever the level of other loggers."""

    def __init__(self) -> None:
        super().__init__("InprocessRestarter", logging.INFO)
        self.addHandler(_Stdout())
        self.propagate = False


class _Stdout(logging.Handler):
    """Looks stdout up at each line: it may have been redirected since."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            self.handleError(record)


_LOGGER = NestedRestarterLogger()


@dataclass
class NestedRestarterCallback:
    """Tells one state, and the stage of it where there is one."""

    restarter_state: str
    restarter_stage: str | None = None
    logger: NestedRestarterLogger = _LOGGER
    special_rank: int = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Tell it, on the special rank (by the rank that it had at first)."""
        if state.initial_rank == self.special_rank:
            stage = f" stage={self.restarter_stage}" if self.restarter_stage else ""
            self.logger.info("[NestedRestarter] name=[InProcess] state=%s%s", self.restarter_state, stage)
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """At the first start `initialize`; at every other one the fault has been handled."""

    restarter_state: str = "initialize"

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", special_rank=special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        """See `NestedRestarterCallback.__call__`. A process that joins later knows by the iteration (W5)."""
        if state.iteration > 0:
            self.restarter_state, self.restarter_stage = "handling", "completed"
        return super().__call__(state)


@dataclass
class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """A fault begins to be handled."""

    restarter_state: str = "handling"
    restarter_stage: str | None = "starting"


@dataclass
class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """All is done."""

    restarter_state: str = "finalized"


@dataclass
class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """This rank leaves."""

    restarter_state: str = "aborted"
