"""One worker's own side of the recovery protocol, as a table.

Rule 1: every fact about what may follow what lives in TRANSITIONS.
Rule 2: nothing here waits, reads a clock, or knows a thread, a link or torch. Two threads of the worker step it (the
        one that runs the user's function, and the one that reads the agent's link) under one lock of the driver's.
Rule 3: the function is on the stack in RUNNING and UNWINDING only, so only there can an interrupt be meant for it.
        A main thread that is about to act on RUN and finds UNWINDING instead does not call it, and says Unwound.
Rule 4: what the agent says comes in order, but perhaps twice: a notice of an old generation, or one already acted on,
        is void. Anything else that the table does not list is a bug of ours and raises.

A fresh process that has been given a rank runs the script's own top level first (BEGINNING). A fault of the
generation then has nothing to unwind, and the top level may take minutes: the member arrives for the next generation
at once (RECALLED) and goes on with its script; it meets the others when it comes to the wrapped call.

A generation may be declared finished by one agent while another has already sent its members back (their news
crossed): whoever had completed it returns, whether it still waits or has been cleaned (CHECKING, WAITING).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.errors import ProtocolError


class Phase(enum.Enum):
    """Where this member stands."""

    FRESH = "fresh"  # warm to the imports; no rank, the script has not begun
    BEGINNING = "beginning"  # has a rank; the script's top level runs, the wrapped call has not been reached
    RECALLED = "recalled"  # the same, but its generation has ended: it has arrived for the next one
    RUNNING = "running"  # the wrapped function is on the stack
    COMPLETING = "completing"  # it returned; waiting for the others, interruptible
    UNWINDING = "unwinding"  # told to stop; the function is still on the stack
    CHECKING = "checking"  # the function is off the stack; global state is being reset, health checked
    WAITING = "waiting"  # arrived for the next generation; waiting for its roster
    DONE = "done"  # all have completed; the call returns and the script goes on to its end
    LEFT = "left"  # the process is on its way out; nothing matters any more


@dataclass(frozen=True, slots=True)
class Entered:
    """The agent: the roster of `generation` lists this member (rank and companions' words are beside it)."""

    generation: int


@dataclass(frozen=True, slots=True)
class Called:
    """Main thread: the script has come to the wrapped call."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Main thread: the function has returned."""


@dataclass(frozen=True, slots=True)
class Raised:
    """Main thread: the function has ended with an exception that is not our interrupt."""


@dataclass(frozen=True, slots=True)
class Unwound:
    """Main thread: our interrupt has come out of the function."""


@dataclass(frozen=True, slots=True)
class Told:
    """The agent: `generation` has a fault, leave the function."""

    generation: int


@dataclass(frozen=True, slots=True)
class Healthy:
    """Main thread: cleaning is over and this process may go on (what is left dirty is told with the arrival)."""


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """Main thread: the abort, a finalizer or the health check failed; this process must be replaced."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The agent: every member has completed `generation` and all that was intended is durable."""

    generation: int


@dataclass(frozen=True, slots=True)
class Excluded:
    """The agent: this process is not needed (a spare let go)."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The agent is gone; nobody would see this process die (P15)."""


Event = (
    Entered
    | Called
    | Returned
    | Raised
    | Unwound
    | Told
    | Healthy
    | Unhealthy
    | Finished
    | Excluded
    | LinkLost
)  # fmt: skip


class Action(enum.Enum):
    """What the driver does, in the order given.

    Whichever thread made the step does the rest; BEGIN, RUN, CLEAN and RETURN it hands over to the main thread.
    """

    BEGIN = "begin"  # set the environment of this rank and run the script's top level
    RUN = "run"  # call the user's function
    REPORT_FAULT = "report fault"  # tell the agent what was raised, and where
    REPORT_COMPLETED = "report completed"
    ABORT = "abort"  # sever this generation's groups and its store connection; from whichever thread
    INTERRUPT = "interrupt"  # raise in the thread of the function until it is off the stack
    CLEAN = "clean"  # drop frames, finalize, reset global state (P9), check health; answer Healthy or Unhealthy
    ARRIVE = "arrive"  # tell the agent: ready for generation + 1, with the facts
    RETURN = "return"  # return from the wrapped call
    LEAVE = "leave"  # end this process


Step = tuple[Phase, tuple[Action, ...]]

P, A = Phase, Action
LEAVE: Step = (P.LEFT, (A.LEAVE,))
TRANSITIONS: Mapping[Phase, Mapping[type[Event], Step]] = {
    P.FRESH: {
        Entered: (P.BEGINNING, (A.BEGIN,)),
        Excluded: LEAVE,
        LinkLost: LEAVE,
    },
    P.BEGINNING: {
        Called: (P.RUNNING, (A.RUN,)),
        Told: (P.RECALLED, (A.ARRIVE,)),
        LinkLost: LEAVE,
    },
    P.RECALLED: {
        Called: (P.WAITING, ()),
        Entered: (P.BEGINNING, ()),
        Told: (P.RECALLED, ()),
        LinkLost: LEAVE,
    },
    P.RUNNING: {
        Returned: (P.COMPLETING, (A.REPORT_COMPLETED,)),
        Raised: (P.CHECKING, (A.REPORT_FAULT, A.ABORT, A.CLEAN)),
        Told: (P.UNWINDING, (A.ABORT, A.INTERRUPT)),
        LinkLost: LEAVE,
    },
    P.COMPLETING: {
        Finished: (P.DONE, (A.RETURN,)),
        Told: (P.CHECKING, (A.ABORT, A.CLEAN)),
        LinkLost: LEAVE,
    },
    P.UNWINDING: {  # however the function ends now, the generation is over: its result or its exception is void
        Unwound: (P.CHECKING, (A.CLEAN,)),
        Returned: (P.CHECKING, (A.CLEAN,)),
        Raised: (P.CHECKING, (A.CLEAN,)),
        Told: (P.UNWINDING, ()),
        LinkLost: LEAVE,
    },
    P.CHECKING: {
        Healthy: (P.WAITING, (A.ARRIVE,)),
        Unhealthy: LEAVE,
        Told: (P.CHECKING, ()),
        Finished: (P.DONE, (A.RETURN,)),
        LinkLost: LEAVE,
    },
    P.WAITING: {
        Entered: (P.RUNNING, (A.RUN,)),
        Told: (P.WAITING, ()),
        Finished: (P.DONE, (A.RETURN,)),
        LinkLost: LEAVE,
    },
    P.DONE: {
        Healthy: (P.DONE, ()),  # cleaning was under way when the end was declared
        Unhealthy: (P.DONE, ()),
        Finished: (P.DONE, ()),
        LinkLost: LEAVE,
    },
    P.LEFT: dict.fromkeys(  # the other thread may be a moment behind
        (Called, Returned, Raised, Unwound, Told, Healthy, Unhealthy, Finished, Excluded, LinkLost), (P.LEFT, ())
    ),
}


@dataclass(frozen=True, slots=True)
class Own:
    """This member's state: its phase, and the last generation that it was entered into (-1: none)."""

    phase: Phase = Phase.FRESH
    generation: int = -1


def begin() -> Own:
    """Return the state of a process that has just announced itself."""
    return Own()


def step(own: Own, event: Event) -> tuple[Own, tuple[Action, ...]]:
    """Return the next state and what to do. Raises ProtocolError, with `own` still good, for what cannot follow."""
    if _old(own, event):
        return own, ()
    legal = TRANSITIONS[own.phase]
    if type(event) not in legal or _from_the_future(own, event):
        expected = ", ".join(sorted(known.__name__ for known in legal))
        raise ProtocolError(
            f"{event!r} arrived at a member that is {own.phase.value} in generation {own.generation}. "
            f"Expected: {expected}, for this generation. A driver sent an event out of order: see docs/recovery.md."
        )
    phase, actions = legal[type(event)]
    generation = event.generation if isinstance(event, Entered) else own.generation
    return Own(phase, generation), actions


def _old(own: Own, event: Event) -> bool:
    """Tell whether this is a notice of a generation that is behind us (entering one twice is once too often)."""
    match event:
        case Entered(generation):
            return generation <= own.generation
        case Told(generation) | Finished(generation):
            return generation < own.generation
        case _:
            return False


def _from_the_future(own: Own, event: Event) -> bool:
    return isinstance(event, Told | Finished) and event.generation > own.generation
