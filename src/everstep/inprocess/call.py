"""The driver of one wrapped call: steps `recovery.core.member` with what happens, and does what the table says.

Threads: `call` and all of its body run on the thread of the wrapped call; `_heard` on the session's waiter thread;
`_tick` on the ticker. All three step the table under one lock; only the main thread runs, cleans and returns.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar

from everstep import environ
from everstep.clock import Clock
from everstep.errors import EverstepError, ExitCode, UsageError
from everstep.events import Arrived, Category, SpanClosed, SpanOpened, StopBegun
from everstep.inprocess.core.pursuit import Verdict
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart
from everstep.process.page import Phase as PagePhase
from everstep.recovery.core import member
from everstep.recovery.core.member import Action, Phase
from everstep.recovery.session import Session

T = TypeVar("T")
TICK_S = 0.1
_REFUSALS = (ExitCode.USAGE, ExitCode.CONFIGURATION)
_DEEPEST = 30
_PEER_GONE = ("gloo/transport/tcp", "Connection closed by peer", "ncclRemoteError", "NCCL communicator was aborted")
_WAITS = (f"{os.sep}torch{os.sep}distributed{os.sep}",)
"""A main thread whose innermost frame lies here waits for other ranks: it is a victim, not a culprit (H1)."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One generation, as this rank was told of it."""

    generation: int
    epoch: int
    rank: int
    world_size: int
    store: tuple[str, int]
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Assignment":
        """Take it from the agent's message."""
        host, port = message["store"]
        return cls(
            message["generation"], message["epoch"], message["rank"], message["world_size"], (host, port),
            message["companions"],
        )  # fmt: skip


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
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._interrupter: Interrupter | None = None
        self._cleaner: Cleaner | None = None
        self._exit: SystemExit | None = None
        session.on("world", self._heard)

    # -- main thread ---------------------------------------------------------------------------------------------

    def call(self, body: Callable[[Assignment], T], interrupter: Interrupter, cleaner: Cleaner) -> T:
        """Run `body` in every generation until all ranks have completed one; return what it returned here.

        Raises what asked for the end (SystemExit, KeyboardInterrupt); faults of the body are the ladder's business.
        """
        self._check_place()
        self.session.called = True
        self._interrupter, self._cleaner = interrupter, cleaner
        self.session.send({"kind": "world.attached"})
        self._step(member.Called())
        ticker = threading.Thread(target=self._tick, args=(interrupter, cleaner), name="everstep-ticker", daemon=True)
        ticker.start()
        unraisable, sys.unraisablehook = sys.unraisablehook, _quiet(sys.unraisablehook)
        try:
            cleaner.begin()
            return self._generations(body, interrupter, cleaner)
        finally:
            sys.unraisablehook = unraisable
            self._over.set()
            ticker.join()
            interrupter.close()
            self.session.page.phase(PagePhase.NONE, self._clock.now())

    def _check_place(self) -> None:
        """Refuse a call that cannot be recovered. The agent is told too: on a thread nobody may look at the error."""
        text = ""
        if self.session.called:
            text = (
                "a second wrapped function was called in this process. Everstep recovers one wrapped call a process "
                "for now: call the other training from inside the first, or run it as a job of its own."
            )
        elif threading.get_ident() != self._main:
            text = "the wrapped function must be called on the main thread: signals interrupt only there."
        if text:
            refusal = UsageError(text)
            self._refuse(refusal)
            raise refusal

    def _generations(self, body: Callable[[Assignment], T], interrupter: Interrupter, cleaner: Cleaner) -> T:
        result: list[T] = []
        while True:
            self._wait_for(Phase.RUNNING, Phase.DONE)
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
        except (SystemExit, KeyboardInterrupt) as end:
            return self._asked(end)
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises is a fault of the generation
            self._raised(error)
            return error
        self._step(member.Returned())
        return None

    def _asked(self, end: SystemExit | KeyboardInterrupt) -> BaseException | None:
        """`sys.exit(0)` is a way to complete; any other code ends the job with it (IR-12).

        Unless this generation is being left: then it is what the function made of our interrupt, and void.
        """
        if isinstance(end, SystemExit) and end.code in (None, 0):
            self._exit = SystemExit(0)
            self._step(member.Returned())
            return None
        if self._phase() is not Phase.RUNNING:
            self._step(member.Raised(), error=end)
            return end
        code = 130 if isinstance(end, KeyboardInterrupt) else end.code if isinstance(end.code, int) else 1
        text = f"{_brief(end)}, raised in the wrapped function, asked for the end"
        self.session.send({"kind": "world.asked", "code": code, "text": text})
        raise end

    def _raised(self, error: BaseException) -> None:
        """Say what happened, once and in full, before anything of it is dropped."""
        if self._phase() is Phase.RUNNING:
            with contextlib.suppress(Exception):  # the script may have put anything in its place
                sys.stderr.write("".join(self._printed(error)))
                sys.stderr.flush()
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
        environ.update(
            {
                "RANK": str(assignment.rank),
                "WORLD_SIZE": str(assignment.world_size),
                "MASTER_ADDR": assignment.store[0],
                "MASTER_PORT": str(assignment.store[1]),
                "TORCHELASTIC_RESTART_COUNT": str(assignment.generation),
            }
        )

    def _clean(self, error: BaseException | None, cleaner: Cleaner) -> None:
        generation = self._assignment.generation
        self.session.page.phase(PagePhase.WAITING, self._clock.now())
        self.session.telemetry.emit(StopBegun(number=generation))
        try:
            dirt = cleaner.clean(error)
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
            text = _brief(error)
            self.session.send({"kind": "world.fault", "generation": generation, "fault": "exception", "text": text})
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
            case "world.probe":
                stack, waiting = self._where()
                self.session.send({"kind": "world.heard", "stack": stack, "waiting": waiting})
            case _:
                pass

    def _where(self) -> tuple[str, bool]:
        """Return the main thread's stack as text, and whether it waits for other ranks."""
        frame: FrameType | None = sys._current_frames().get(self._main)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # the documented name
        if frame is None:
            return "", False
        waiting = any(part in frame.f_code.co_filename for part in _WAITS)
        return "".join(traceback.format_stack(frame)[-_DEEPEST:])[-4000:], waiting

    # -- ticker --------------------------------------------------------------------------------------------------

    def _tick(self, interrupter: Interrupter, cleaner: Cleaner) -> None:
        while not self._clock.wait(self._over, TICK_S):
            now = self._clock.now()
            self.session.page.tick(now)
            cleaner.tick()
            verdict = interrupter.pursue(now)
            if verdict is Verdict.SEVER:
                cleaner.abort()
            elif verdict is Verdict.REPLACE:
                text = "it does not leave the function: the interrupt was deferred or swallowed for too long"
                self.session.send({"kind": "world.replace", "text": text})


def _quiet(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Our interrupt is sometimes swallowed by a finalizer (E20) and raised again: nobody need read about the first."""

    def heard(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RankShouldRestart):
            hook(unraisable)

    return heard


def is_victim(error: BaseException) -> bool:
    """True for what gloo and NCCL raise when a peer is gone: another rank's fault has the traceback that matters."""
    return isinstance(error, RuntimeError) and any(sign in _brief(error) for sign in _PEER_GONE)


def _brief(error: BaseException | None) -> str:
    if error is None:
        return ""
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return type(error).__name__
