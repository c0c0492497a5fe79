"""The phases of a restart as they really are in the simulated world, and harm that is done at a chosen one.

    SimulatedWorld(setting, strikes=[Strike(Moment.STEP, 0, "raise"), Strike(Moment.HEALTH_CHECK, 2, "kill")]).run()

A moment is where the process that holds a rank stands, whatever any agent believes. Strikes come in their order, each
as soon as its moment has come; those with `at_once` come together with the one before them, wherever their rank stands.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.recovery.core.member import Phase
from everstep.recovery.core.words import Incarnation
from everstep.testing.world.scene import Scene
from everstep.testing.world.worker import SimulatedWorker


class Moment(enum.Enum):
    """Where a rank stands. All but the first and `SCRIPT` are phases of a restart, or of the end."""

    STEP = "step"  # in the function, past its first collective
    ABORT = "abort"  # told to leave; the interrupt has not come out anywhere yet
    UNWIND = "unwind"  # the function's own clean-up runs
    FINALIZE = "finalize"  # off the stack; state is dropped and reset
    HEALTH_CHECK = "health check"
    ROSTER = "roster"  # arrived; the others have not, or the roster has not been published
    ASSIGNMENT = "assignment"  # it stands in a published roster, and does not know it yet
    SCRIPT = "script"  # a new process on its way to the wrapped call
    INITIALIZE = "initialize"  # the function makes its groups
    FIRST_COLLECTIVE = "first collective"
    COMPLETION = "completion"  # its function has returned; the others' have not, or the end is not published
    SHUTDOWN = "shutdown"  # the call returns, the script goes on to its end


RESTART = tuple(m for m in Moment if m not in (Moment.STEP, Moment.SCRIPT))


@dataclass(frozen=True, slots=True)
class Strike:
    """Harm (one of the adversary's `STRIKES`) when whoever holds `rank` stands at `moment`."""

    moment: Moment
    rank: int
    harm: str
    victim: int | None = None  # the rank that is harmed; None: the one that stands there
    at_once: bool = False
    generation: int | None = None  # not before this one has a roster; None: at any time


def holder(scene: Scene, workers: Mapping[Incarnation, SimulatedWorker], rank: int) -> SimulatedWorker | None:
    """Return the process that the newest roster names for this rank; None before the first, and for none."""
    members = scene.board[last].members if (last := newest(scene)) >= 0 else ()
    return workers[members[rank].incarnation] if rank < len(members) else None


def newest(scene: Scene) -> int:
    """Return the last generation that has a roster; -1 before the first."""
    return max((g for g, roster in scene.board.items() if roster.members), default=-1)


def stands_at(scene: Scene, worker: SimulatedWorker) -> Moment | None:
    """Say where a process stands; None between two moments, and where it is not well."""
    if not worker.well:
        return None
    phase = worker.own.phase
    if phase in (Phase.WAITING, Phase.FRESH):
        return Moment.ASSIGNMENT if newest(scene) > worker.own.generation else Moment.ROSTER
    if phase is Phase.CHECKING:
        return Moment.FINALIZE if worker.finalizing else Moment.HEALTH_CHECK
    if phase is Phase.UNWINDING:
        return Moment.UNWIND if worker.unwinding else Moment.ABORT
    if phase is Phase.RUNNING:
        return _inside(scene, worker)
    return _OTHERS.get(phase)


def _inside(scene: Scene, worker: SimulatedWorker) -> Moment | None:
    if not worker.on_stack:
        return None
    if worker.preparing:
        return Moment.INITIALIZE
    first = worker.steps == scene.start_of[worker.own.generation]
    return Moment.FIRST_COLLECTIVE if first else Moment.STEP


_OTHERS = {
    Phase.BEGINNING: Moment.SCRIPT,
    Phase.RECALLED: Moment.SCRIPT,
    Phase.COMPLETING: Moment.COMPLETION,
    Phase.DONE: Moment.SHUTDOWN,
}
