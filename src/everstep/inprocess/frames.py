"""Nothing of a failed attempt stays alive: its frames, its tensors, its children, its threads.

A traceback holds frames, they hold locals, those hold the model; beside it the next attempt's model does not fit
(IR-01). FSDP2's parameters are cyclic on top (E26) and die only in a collection, which `gc.freeze` at the first entry
makes cheap: what was there before the function is never looked at again.

Rule 1: an exception becomes text once, then everything that can be reached from it is cleared.
Rule 2: children that were started inside are killed: they hold copies of our sockets and old parameters (Z8, E30).
Rule 3: a thread cannot be killed. One that outlives its grace is named, and the worker is replaced (Z8).
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType

import psutil

from everstep.clock import SYSTEM, Clock

OURS = "everstep"
_ForeignThread = threading._DummyThread  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
"""A thread of C++ that once ran Python: autograd's device threads, which stay and cannot be joined."""
_LASTING = ("tqdm._monitor.TMonitor",)
"""Threads that belong to a library for the life of the process and hold nothing of the function."""
_LASTING_CHILDREN = ("torch/_inductor/compile_worker", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that a library starts once for the process and would miss: known by their command line."""
_REAP_S = 1.0


def describe(error: BaseException, limit: int = 100_000) -> str:
    """Return the traceback as text, also where the error's own `__str__` raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - user code runs in there
        try:
            frames = "".join(traceback.format_tb(error.__traceback__))
        except Exception:  # noqa: BLE001
            frames = ""
        text = f"Traceback (most recent call last):\n{frames}{type(error).__name__} (its text cannot be made)\n"
    return text if len(text) <= limit else f"{text[: limit // 2]}\n…\n{text[-limit // 2 :]}"


def drop(error: BaseException | None) -> None:
    """Clear the frames of an exception and of all that it caused, followed or contains."""
    for each in list(_family(error)):
        traceback_, each.__traceback__ = each.__traceback__, None
        _clear(traceback_)
        each.__cause__ = each.__context__ = None
        each.args = ()
        with contextlib.suppress(AttributeError):
            each.__dict__.clear()
        for attribute in ("obj", "value"):  # what an AttributeError or a StopIteration was about
            with contextlib.suppress(AttributeError, TypeError):
                setattr(each, attribute, None)
    for name in ("last_exc", "last_value", "last_traceback"):
        if getattr(sys, name, None) is not None:
            setattr(sys, name, None)


def inside(matches: Callable[[CodeType], bool]) -> bool:
    """Tell whether a thread of this process is inside a function whose code matches."""
    for frame in sys._current_frames().values():  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        within: FrameType | None = frame
        while within is not None:
            if matches(within.f_code):
                return True
            within = within.f_back
    return False


def _family(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _clear(traceback_: TracebackType | None) -> None:
    while traceback_ is not None:
        with contextlib.suppress(RuntimeError):  # a frame that still runs: the wrapper's own
            traceback_.tb_frame.clear()
        traceback_ = traceback_.tb_next


def settle() -> None:
    """Before the function's first call: collect once, and exempt what lives now from every later collection."""
    gc.collect()
    gc.freeze()


class Leftovers:
    """The threads and children that a function started and left behind."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        """Note what there is before the function is called."""
        self._clock = clock
        self._threads = {id(thread): thread for thread in threading.enumerate()}
        self._children = {(child.pid, child.create_time()) for child in _children()}

    def kill_children(self) -> tuple[str, ...]:
        """Kill what was started since, and the children of those; name them."""
        killed: list[str] = []
        with _unheard_deaths():
            for child in _children():
                with contextlib.suppress(psutil.Error):
                    if (child.pid, child.create_time()) in self._children or _lasts(child):
                        continue
                    name = f"{child.name()} {child.pid}"
                    child.kill()
                    killed.append(name)
            self._reap()
        return tuple(killed)

    def threads(self, grace_s: float) -> tuple[str, ...]:
        """Give threads started since `grace_s` to end, together; name those that have not."""
        until = self._clock.now() + grace_s
        left = [thread for thread in threading.enumerate() if self._strange(thread)]
        for thread in left:
            thread.join(max(0.0, until - self._clock.now()))
        return tuple(thread.name for thread in left if thread.is_alive())

    def _strange(self, thread: threading.Thread) -> bool:
        if isinstance(thread, _ForeignThread):
            return False
        kind = f"{type(thread).__module__}.{type(thread).__qualname__}"
        known = id(thread) in self._threads or thread is threading.current_thread()
        return not known and not thread.name.startswith(OURS) and kind not in _LASTING

    def _reap(self) -> None:
        """Take the exit status of children of our own, so that no zombie keeps their name.

        multiprocessing takes that of its own: where another does, it keeps their descriptors for ever.
        """
        until = self._clock.now() + _REAP_S
        while True:
            theirs = {process.pid for process in multiprocessing.active_children()}  # those that have ended are gone
            left = [child for child in _children() if not self._known(child)]
            if all(child.pid not in theirs and _ended(child) for child in left) or self._clock.now() > until:
                return
            self._clock.sleep(0.002)

    def _known(self, child: psutil.Process) -> bool:
        try:
            return (child.pid, child.create_time()) in self._children or _lasts(child)
        except psutil.ZombieProcess:  # it tells no command line any more: what we have killed, and must reap
            return False
        except psutil.Error:
            return True


@contextmanager
def _unheard_deaths() -> Generator[None]:
    """Keep handlers of SIGCHLD out: torch's raises in the main thread when a data loader's worker is killed.

    It says nothing of children that were reaped meanwhile. Handlers belong to the main thread: elsewhere they stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _lasts(child: psutil.Process) -> bool:
    line = " ".join(child.cmdline())
    return any(mark in line for mark in _LASTING_CHILDREN)


def _ended(child: psutil.Process) -> bool:
    """Reap a child of ours if it has ended; True where nothing is left to wait for."""
    try:
        return os.waitpid(child.pid, os.WNOHANG)[0] == child.pid
    except ChildProcessError:  # a grandchild, or reaped by its owner
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
