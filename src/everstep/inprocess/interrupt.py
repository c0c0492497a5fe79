"""Raise `RankShouldRestart` in the thread that runs the wrapped function, at any moment, and in nothing else.

A real-time signal, sent with `pthread_kill` from inside this process, ends blocking system calls at once; its Python
handler raises. Where that way is closed (the function is not in the main thread, the signal is taken) an asynchronous
exception takes its place, which waits for the next bytecode.

Rule 1: the handler raises only while the marker's frame is on the interrupted stack (I7), so a late signal can never
        unwind the wrapper itself.
Rule 2: no raise during an import (I1, E18: an interrupted import leaves a process that fails later) nor inside
        `atomic()`; `pursue` notices the deferral and sends again, or gives up.
Rule 3: each raise is licensed once, by `interrupt` or by `pursue`; a signal without a licence does nothing.
Rule 4: the handler takes no lock, logs nothing and waits for nothing (I6).
Rule 5: no signal is sent unless C still holds Python's handler for it (E21: `faulthandler.register` takes it while
        `signal.getsignal` still shows ours, and a real-time signal without a handler kills the process).
"""

import ctypes
import enum
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, ClassVar, TypeVar

from everstep.clock import SYSTEM, Clock
from everstep.inprocess.core.pursuit import Chase, Look, Patience, Verdict, step

T = TypeVar("T")
FIRST_SIGNAL = signal.SIGRTMIN + 5
_IMPORT_FILES = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_HANDLER_SIZE = ctypes.sizeof(ctypes.c_void_p)
_libc = ctypes.PyDLL(None)  # keeps the interpreter lock: taking it back from a busy thread costs up to 5 ms


class RankShouldRestart(BaseException):
    """Leave the wrapped function: the generation has a fault. A BaseException, so that `except Exception` misses it."""

    def __init__(self, generation: int | None = None) -> None:
        super().__init__(generation)
        self.generation = generation

    def __str__(self) -> str:
        return f"generation {self.generation} has a fault: leave the function"


class Way(enum.Enum):
    """How the exception comes into the function's thread."""

    SIGNAL = "signal"
    ASYNCHRONOUS = "asynchronous exception"


class Interrupter:
    """Interrupts one function at a time. `call` runs it; `interrupt` and `pursue` come from other threads."""

    def __init__(self, signum: int | None = None, patience: Patience | None = None, clock: Clock = SYSTEM) -> None:
        self._wish = signum
        self._patience = patience or Patience()
        self._clock = clock
        self._lock = threading.Lock()  # orders asynchronous exceptions with arming, disarming and atomic sections
        self._signum = 0
        self._address = 0  # C's handler right after ours was installed: that of Python itself
        self._before: Any = signal.SIG_DFL
        self._heard = False
        self._way = Way.ASYNCHRONOUS
        self._thread = 0
        self._armed: int | None = None
        self._wanted: int | None = None
        self._depth = 0  # nesting of atomic sections
        self._raised = 0
        self._licences = 0
        self._chase: Chase | None = None

    @property
    def way(self) -> Way:
        """The way that the present (or the next) call is interrupted; found out at its entry."""
        return self._way

    @property
    def wanted(self) -> int | None:
        """The generation that shall be left, if any."""
        return self._wanted

    def call(self, generation: int, function: Callable[[], T]) -> T:
        """Run `function`; a `RankShouldRestart` comes out of it if this generation is interrupted meanwhile.

        A wish that came before the call is honoured at its beginning, one that comes after its end does nothing.
        """
        self._arm(generation)
        try:
            try:
                return self._marked(function)
            finally:
                self._disarm()
        finally:  # an asynchronous exception may have struck inside the inner finally; there is never a second one
            self._disarm()

    def interrupt(self, generation: int) -> None:
        """Have `generation` left. Never blocks; any thread but the function's own."""
        armed = self._armed
        if self._wanted == generation or armed not in (None, generation):
            return  # said before, or late: that generation has been left
        self._wanted = generation
        if armed == generation:
            self._begin(generation)

    def pursue(self, now: float) -> Verdict:
        """Look after an interrupt that is under way; to be called some ten times a second from one ticking thread."""
        armed, chase = self._armed, self._chase
        if armed is None or armed != self._wanted:
            return Verdict.KEEP
        if chase is None or chase.generation != armed:  # the wish came while the call was being entered
            self._begin(armed)
            return Verdict.KEEP
        look = self._look()
        self._chase, verdict = step(chase, look, now, self._patience)
        if verdict in (Verdict.AGAIN, Verdict.SEVER):
            self._send(look.raised + 1)
        return verdict

    @contextmanager
    def atomic(self) -> Generator[None]:
        """A section in which nothing is raised; a deferred interrupt comes at its end.

        For the function's own thread; elsewhere it does nothing. Keep it short: rule 5 of pursuit bounds it.
        """
        if threading.get_ident() != self._thread:
            yield
            return
        self._shield()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._overdue()

    def close(self) -> None:
        """Give the signal back. Main thread only, no call under way."""
        if self._signum and self._installed():
            signal.signal(self._signum, self._before)
        self._signum = 0

    # Entering and leaving

    def _arm(self, generation: int) -> None:
        self._thread = threading.get_ident()
        self._way = Way.SIGNAL if self._signal_works() else Way.ASYNCHRONOUS
        self._depth = self._raised = self._licences = 0
        self._chase = None
        self._armed = generation

    def _disarm(self) -> None:
        while True:
            try:
                with self._lock:
                    self._armed = None
                    self._chase = None
                    if self._way is Way.ASYNCHRONOUS:
                        _raise_in(self._thread, None)
                return
            except RankShouldRestart:  # struck between two bytecodes above: the call is over, its caller knows why
                continue

    def _shield(self) -> None:
        if self._way is Way.SIGNAL:
            self._depth += 1
            return
        with self._lock:
            self._depth += 1
            _raise_in(self._thread, None)  # what was on its way comes at the end of the section

    def _overdue(self) -> None:
        """Raise what was put off: licensed, not yet raised, and this is the function's thread."""
        if self._armed is not None and self._armed == self._wanted and self._raised < self._licences:
            self._raised += 1
            raise RankShouldRestart(self._wanted)

    def _marked(self, function: Callable[[], T]) -> T:
        """The marker: nothing is raised unless this frame is on the stack."""
        if self._armed == self._wanted:
            raise RankShouldRestart(self._wanted)
        return function()

    _MARKER: ClassVar[CodeType] = _marked.__code__

    def _open_to_raise(self, frame: FrameType | None) -> bool:
        """Tell whether the marker is on this stack and no import lies above it."""
        while frame is not None:
            if frame.f_code is self._MARKER:
                return True
            if frame.f_code.co_filename in _IMPORT_FILES:
                return False
            frame = frame.f_back
        return False

    # Sending

    def _begin(self, generation: int) -> None:
        self._chase = Chase.begin(generation, self._clock.now())
        self._send(1)

    def _send(self, licences: int) -> None:
        """Licence one more raise, where the one before was used, and knock."""
        self._licences = licences
        if self._way is Way.SIGNAL and self._installed():
            signal.pthread_kill(self._thread, self._signum)
            return
        with self._lock:
            if self._armed is None or self._depth or self._raised >= self._licences:
                return
            look = self._look()
            if look.deferred or not look.stack:
                return
            self._raised += 1
            _raise_in(self._thread, RankShouldRestart)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._heard = True
        if self._armed is None or self._armed != self._wanted or self._depth or self._raised >= self._licences:
            return
        if not self._open_to_raise(frame):
            return
        self._raised += 1
        raise RankShouldRestart(self._wanted)

    def _look(self) -> Look:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        stack: list[int] = []
        importing, inside = False, False
        while frame is not None and not inside:
            stack.append(id(frame))
            importing = importing or frame.f_code.co_filename in _IMPORT_FILES
            inside = frame.f_code is self._MARKER
            frame = frame.f_back
        if not inside:
            return Look((), self._raised, handling=False)
        deferred = importing or self._depth > 0
        return Look(tuple(reversed(stack)), self._raised, _handles(self._thread), deferred)

    # The signal

    def _signal_works(self) -> bool:
        """Install where needed and prove by a signal to ourselves that the handler runs (I3)."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._signum:
            self._install()
        if not self._signum or not self._installed():
            return False
        self._heard = False
        signal.pthread_kill(threading.get_ident(), self._signum)
        if not self._heard and self._signum in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (self._signum,))
        return self._heard

    def _install(self) -> None:
        candidates = range(FIRST_SIGNAL, signal.SIGRTMAX + 1) if self._wish is None else (self._wish,)
        free = next((s for s in candidates if _address(s) == 0), 0)
        if not free:
            return
        self._before = signal.signal(free, self._on_signal)
        self._address = _address(free)
        self._signum = free

    def _installed(self) -> bool:
        return _address(self._signum) == self._address and signal.getsignal(self._signum) == self._on_signal


def _handles(thread: int) -> bool:
    """Tell whether our exception is active in that thread, at the top or as the context of what is."""
    active: Any = sys._current_exceptions().get(thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    error: BaseException | None = active[1] if isinstance(active, tuple) else active  # a triple before Python 3.12
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RankShouldRestart):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Leave (or, with None, take back) an asynchronous exception in a thread."""
    error = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def _address(signum: int) -> int:
    """Return C's handler of a signal: 0 is the default action, 1 is ignored. First word of `struct sigaction`."""
    action = ctypes.create_string_buffer(512)
    if _libc.sigaction(signum, None, action) != 0:
        return -1
    return int.from_bytes(action.raw[:_HANDLER_SIZE], sys.byteorder)
