"""The driver of one wrapped call: steps `recovery.core.member` with what happens, and does what the table says.

Threads: `call` and all of its body run on the thread of the wrapped call, which is the main thread unless the script
calls from another; `_heard` on the session's waiter thread; `_tick` on the ticker. All three step the table under one
lock; only the call's own thread runs, cleans and returns.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, TypeVar

from everstep import environ
from everstep.clock import Clock
from everstep.errors import EverstepError, ExitCode, JobDrained, JobEnded, UsageError
from everstep.events import Arrived, Category, SpanClosed, SpanOpened, StopBegun
from everstep.inprocess.assignment import Assignment
from everstep.inprocess.core.pursuit import Verdict
from everstep.inprocess.exception import RestartAbort
from everstep.inprocess.function import exit_code
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart
from everstep.process import pulse, threads
from everstep.process.page import Phase as PagePhase
from everstep.recovery import session as sessions
from everstep.recovery.core import member
from everstep.recovery.core.member import Action, Phase
from everstep.recovery.session import Session
from everstep.recovery.victims import is_victim
from everstep.telemetry import show

T = TypeVar("T")
TICK_S = 0.1
_REFUSALS = (ExitCode.USAGE, ExitCode.CONFIGURATION, ExitCode.BAD_NODE)
_DEEPEST = 30
_WAITS = (f"{os.sep}torch{os.sep}distributed{os.sep}",)
"""A call whose innermost frame lies here waits for other ranks: it is a victim, not a culprit (H1)."""


class Cleaner(Protocol):
    """What leaves a failed attempt behind and makes this process as good as new."""

    def begin(self) -> None:
        """Main thread, our threads are running, the function has not been called yet: note what "as new" means."""
        ...

    def abort(self) -> None:
        """End what the function may be waiting in. Any thread; must not block for long."""
        ...

    def clean(self, error: BaseException | None) -> tuple[str, ...]:
        """Main thread, the function is off the stack: drop, reset, check; name what could not be made as new.

        Raises when this process must be replaced.
        """
        ...

    def tick(self) -> None:
        """Ticker thread, some ten times a second: whatever must go on beside the loop."""
        ...


class Caller:
    """This process's member of the recovery protocol, from the moment it has a rank; runs its one wrapped call."""

    def __init__(self, session: Session) -> None:
        """Main thread, before the script's first line: from here on the agent is heard, also by a script that is slow
        to come to its call.
        """
        assert session.assigned is not None
        self.session = session
        self._clock: Clock = session.clock
        self._changed = threading.Condition()
        self._assignment = Assignment.read(session.assigned)
        self._own, _ = member.step(member.begin(), member.Entered(self._assignment.generation))
        self._thread = threading.get_ident()  # of the wrapped call; until it is called, where it will most likely be
        self._over = threading.Event()
        self._interrupter: Interrupter | None = None
        self._cleaner: Cleaner | None = None
        self._inside: Callable[[FrameType], bool] = lambda _: True
        self._places = pulse.Places()
        self._exit: SystemExit | None = None
        self._ended: JobEnded | None = None
        session.on("world", self._heard)
        session.on("control", self._shown)

    # -- main thread ---------------------------------------------------------------------------------------------

    def call(
        self,
        body: Callable[[Assignment], T],
        interrupter: Interrupter,
        cleaner: Cleaner,
        wishes: Mapping[str, Any] | None = None,
        inside: Callable[[FrameType], bool] = lambda _: True,
    ) -> T:
        """Run `body` in every generation until all ranks have completed one; return what it returned here.

        `wishes` are this call's own limits, for the agent. `inside` tells of a stack whether it stands in the loop that
        turns, where steps are not declared. Raises what asked for the end (SystemExit,
        KeyboardInterrupt, RestartAbort), or JobEnded where no agent ends this process with
        the job; faults of the body are the ladder's business.
        """
        self._check_place()
        self.session.called = True
        self._thread = threading.get_ident()
        self._interrupter, self._cleaner, self._inside = interrupter, cleaner, inside
        self.session.send({"kind": "world.attached", **(wishes or {})})
        self._step(member.Called())
        ticker = threading.Thread(target=self._tick, args=(interrupter, cleaner), name="everstep-ticker", daemon=True)
        ticker.start()
        unraisable, sys.unraisablehook = sys.unraisablehook, _quiet(sys.unraisablehook)
        try:
            cleaner.begin()
            return self._generations(body, interrupter, cleaner)
        finally:
            sys.unraisablehook = unraisable
            self.session.send({"kind": "world.left"})
            self._over.set()
            ticker.join()
            interrupter.close()
            self.session.page.phase(PagePhase.NONE, self._clock.now())

    def _check_place(self) -> None:
        """Refuse a call that cannot be recovered. The agent is told too: on a thread nobody may look at the error."""
        if self.session.called:
            refusal = UsageError(
                "a second wrapped function was called in this process. Everstep recovers one wrapped call a process "
                "for now: have the first call the other as a plain function, without its wrapper, or make it a job of "
                "its own."
            )
            self._refuse(refusal)
            raise refusal

    def _generations(self, body: Callable[[Assignment], T], interrupter: Interrupter, cleaner: Cleaner) -> T:
        result: list[T] = []
        while True:
            self._wait_for(
                Phase.RUNNING, Phase.UNWINDING, Phase.DONE
            )  # told to leave before we woke: left at its entry
            if self._phase() is Phase.DONE:
                break
            result = []
            error = self._attempt(body, result, interrupter)
            if self._phase() is Phase.COMPLETING:
                self._wait_for(Phase.DONE, Phase.CHECKING)
            if self._phase() is Phase.CHECKING:
                self._clean(error, cleaner)
            error = None  # it holds the frames, and they the model (IR-01)
        if self._exit is not None:
            raise self._exit
        return result[0]

    def _attempt(
        self, body: Callable[[Assignment], T], result: list[T], interrupter: Interrupter
    ) -> BaseException | None:
        assignment = self._assignment
        self._begin(assignment)
        self._exit = None
        try:
            result.append(interrupter.call(assignment.generation, lambda: body(assignment)))
        except RankShouldRestart as interrupt:
            self._step(member.Unwound())
            return interrupt
        except (SystemExit, KeyboardInterrupt, RestartAbort) as end:
            return self._asked(end)
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises is a fault of the generation
            self._raised(error)
            return error
        self._step(member.Returned())
        return None

    def _asked(self, end: SystemExit | KeyboardInterrupt | RestartAbort) -> BaseException | None:
        """`sys.exit(0)` is a way to complete; any other code ends the job with it (IR-12).

        Unless this generation is being left: then it is what the function made of our interrupt, and void.
        """
        if isinstance(end, SystemExit) and end.code in (None, 0):
            self._exit = JobDrained(end.step) if isinstance(end, JobDrained) else SystemExit(0)
            self._step(member.Returned())
            return None
        if self._phase() is not Phase.RUNNING:
            self._step(member.Raised(), error=end)
            return end
        self._ask_for_the_end(end)
        raise end

    def _ask_for_the_end(self, end: SystemExit | KeyboardInterrupt | RestartAbort) -> None:
        code = 130 if isinstance(end, KeyboardInterrupt) else exit_code(end)
        text = f"{_brief(end)}, raised in the wrapped function, asked for the end"
        self.session.send({"kind": "world.asked", "code": code, "text": text})

    def _raised(self, error: BaseException) -> None:
        """Say what happened, once and in full, before anything of it is dropped."""
        if self._phase() is Phase.RUNNING:
            show("".join(self._printed(error)))
            if isinstance(error, EverstepError) and error.exit_code in _REFUSALS:
                self._refuse(error)
        self._step(member.Raised(), error=error)

    def _refuse(self, error: EverstepError) -> None:
        """What was asked for cannot be done here, now or in the next generation: the job ends with its words."""
        code = int(error.exit_code)
        self.session.send({"kind": "world.refused", "code": code, "text": str(error)[:4000]})

    def _printed(self, error: BaseException) -> list[str]:
        name = (
            f"everstep: rank {self._assignment.rank}, generation {self._assignment.generation}: the function raised\n"
        )
        if is_victim(error):
            return [f"everstep: rank {self._assignment.rank} lost its connection to a peer: {_brief(error)[:100]}…\n"]
        try:
            return [name, *traceback.format_exception(error)]
        except Exception:  # noqa: BLE001 - a user's __str__ or __cause__ may do anything
            return [name, f"{type(error).__name__} (its text cannot be printed)\n"]

    def _begin(self, assignment: Assignment) -> None:
        now = self._clock.now()
        telemetry = self.session.telemetry
        telemetry.rank, telemetry.generation = assignment.rank, assignment.generation
        self.session.page.enter(assignment.generation, now)
        environ.update(assignment.environment())

    def _clean(self, error: BaseException | None, cleaner: Cleaner) -> None:
        generation = self._assignment.generation
        self.session.page.phase(PagePhase.WAITING, self._clock.now())
        self.session.telemetry.emit(StopBegun(number=generation))
        try:
            dirt = cleaner.clean(error)
        except RestartAbort as end:  # of a callback: it knows that another attempt is of no use
            self._ask_for_the_end(end)
            raise
        except Exception as trouble:  # noqa: BLE001 - a process that cannot be cleaned is replaced, whatever the reason
            self.session.send({"kind": "world.replace", "text": f"cleaning failed: {_brief(trouble)}"})
            self._step(member.Unhealthy())
            return
        self._step(member.Healthy(), dirt=dirt)

    def _phase(self) -> Phase:
        with self._changed:
            return self._own.phase

    def _wait_for(self, *phases: Phase) -> None:
        """Wait until the table has come to one of `phases`. The agent's end ends this process, and with it the wait."""
        with self._changed:
            if Phase.DONE in phases and self._own.phase is Phase.COMPLETING:
                self.session.page.phase(PagePhase.WAITING, self._clock.now())
                self.session.telemetry.emit(SpanOpened(category=Category.COMPLETION.value))
            while self._own.phase not in phases:
                if self._own.phase is Phase.LEFT:
                    os._exit(1)
                if self._ended is not None:
                    raise self._ended
                self._changed.wait(1.0)
            if self._own.phase in (Phase.DONE, Phase.CHECKING) and Phase.DONE in phases and Phase.RUNNING not in phases:
                self.session.telemetry.emit(SpanClosed(category=Category.COMPLETION.value))

    # -- any thread ----------------------------------------------------------------------------------------------

    def _step(self, event: member.Event, error: BaseException | None = None, dirt: tuple[str, ...] = ()) -> None:
        with self._changed:
            self._own, actions = member.step(self._own, event)
            for action in actions:
                self._do(action, error, dirt)
            self._changed.notify_all()

    def _do(self, action: Action, error: BaseException | None, dirt: tuple[str, ...]) -> None:
        """Carry out one action; BEGIN, RUN, CLEAN and RETURN are the main thread's own, which sees the phase."""
        generation = self._assignment.generation
        if action is Action.ABORT and self._cleaner is not None:
            self._cleaner.abort()
        elif action is Action.INTERRUPT and self._interrupter is not None:
            self._interrupter.interrupt(generation)
        elif action is Action.ARRIVE:
            self.session.telemetry.emit(Arrived(number=generation + 1))
            self.session.send({"kind": "world.arrived", "generation": generation + 1, "dirt": list(dirt)})
        elif action is Action.REPORT_FAULT:
            told = {"generation": generation, "fault": "exception", "text": _brief(error)}
            self.session.send({"kind": "world.fault", **told, "victim": is_victim(error)})
        elif action is Action.REPORT_COMPLETED:
            self.session.send({"kind": "world.completed", "generation": generation})
        elif action is Action.LEAVE:
            self.session.send({"kind": "world.left"})

    # -- waiter thread -------------------------------------------------------------------------------------------

    def _heard(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)
        match message["kind"]:
            case "world.stop":
                self._step(member.Told(message["generation"]))
            case "world.assigned":
                with self._changed:
                    self._assignment = Assignment.read(message)
                    self._step(member.Entered(message["generation"]))
            case "world.finish":
                self._step(member.Finished(message["generation"]))
            case "world.ended":
                self._end(JobEnded(message["text"]))
            case "world.probe":
                self.session.send({"kind": "world.heard", **self._where()})
            case _:
                pass

    def _shown(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """An operator asks where this rank stands."""
        for fd in fds:
            os.close(fd)
        if message["kind"] == "control.stacks":
            told = {"waiting": self._where()["waiting"], "threads": threads.told(self._thread)}
            self.session.send({"kind": "control.stand", **told})

    def _end(self, ended: JobEnded) -> None:
        """The job is over, and nobody ends this process: leave the function, if need be, and raise from the call."""
        with self._changed:
            self._ended = ended
            if self._own.phase in (Phase.RUNNING, Phase.COMPLETING):
                self._step(member.Told(self._own.generation))
            self._changed.notify_all()

    def _where(self) -> dict[str, Any]:
        """Return the stack of the call's thread as text, and whether it waits for others and is in its loop."""
        frame: FrameType | None = sys._current_frames().get(self._thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # the documented name
        if frame is None:
            return {"stack": "", "waiting": False, "inside": False}
        waiting = any(part in frame.f_code.co_filename for part in _WAITS)
        stack = "".join(traceback.format_stack(frame)[-_DEEPEST:])[-4000:]
        return {"stack": stack, "waiting": waiting, "inside": self._inside(frame)}

    # -- ticker --------------------------------------------------------------------------------------------------

    def _tick(self, interrupter: Interrupter, cleaner: Cleaner) -> None:
        sign, told = pulse.of(self._thread), False
        while not self._clock.wait(self._over, TICK_S):
            try:
                self._beat(sign, interrupter, cleaner)
            except Exception as trouble:  # noqa: BLE001 - a device that fails, say: nobody would pursue an interrupt then
                if not told:
                    self.session.send({"kind": "world.replace", "text": f"its ticker failed: {_brief(trouble)}"})
                told = True

    def _beat(self, sign: pulse.Sign, interrupter: Interrupter, cleaner: Cleaner) -> None:
        now, page = self._clock.now(), self.session.page
        page.tick(now)
        if sign.beat():
            page.moved(now)
            page.seen(self._places.look(page.progress, sys._current_frames().get(self._thread)))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # the documented name
        cleaner.tick()
        verdict = interrupter.pursue(now)
        if verdict is Verdict.SEVER:
            cleaner.abort()
        elif verdict is Verdict.REPLACE:
            text = "it does not leave the function: the interrupt was deferred or swallowed for too long"
            stack = self._where()["stack"]
            self.session.send({"kind": "world.replace", "text": f"{text}\n{stack}".rstrip()})


_prepared: Caller | None = None


def install(caller: Caller) -> None:
    """Make `caller` the one of this process: by what prepares a worker of an agent, once."""
    global _prepared
    _prepared = caller


def current() -> Caller | None:
    """Return the caller of this process where an agent started it, else None."""
    return _prepared if _prepared is not None and sessions.current() is _prepared.session else None


def _quiet(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Our interrupt is sometimes swallowed by a finalizer (E20) and raised again: nobody need read about the first."""

    def heard(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RankShouldRestart):
            hook(unraisable)

    return heard


def _brief(error: BaseException | None) -> str:
    if error is None:
        return ""
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return type(error).__name__
