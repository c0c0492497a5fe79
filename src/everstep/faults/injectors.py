"""What each type of fault does to the process it is called in, on the thread it is called from.

Rule 1: the effect is there at once (within 0.5 s); nothing is started that outlives it, no thread is used (FI-03).
Rule 2: a hang ends only from outside: it goes on waiting after a signal whose handler raises nothing.
Rule 3: what happens is what a real fault of that kind does. Only core dumps are switched off: one of a training process
        takes minutes, and would be measured as recovery.
"""

import ctypes
import os
import queue
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

from everstep.clock import SYSTEM

_LONG_S = 3600


class InjectedFault(RuntimeError):
    """Raised in the user's function by our own plan. An ordinary exception: what a broken training step raises."""


def _exception(text: str) -> None:
    raise InjectedFault(text)


def _memory(text: str) -> None:
    raise MemoryError(text)


def _hang(_: str) -> NoReturn:
    while True:
        SYSTEM.sleep(_LONG_S)


def _lock(_: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _queue(_: str) -> None:
    queue.Queue[None]().get()


def _socket(_: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def _child(_: str) -> None:
    """The child ends with us: it reads from a pipe whose other end only we hold."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        try:
            child.wait()
        finally:
            child.kill()


def _signal(number: signal.Signals) -> Callable[[str], None]:
    def send(_: str) -> None:
        os.kill(os.getpid(), number)

    return send


def _no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _segfault(_: str) -> None:
    _no_core()
    ctypes.string_at(0)


def _abort(_: str) -> None:
    _no_core()
    os.abort()


def _exit(_: str) -> NoReturn:
    os._exit(1)


def _gil(_: str) -> NoReturn:
    """A PyDLL does not let go of the interpreter lock around its calls."""
    held = ctypes.PyDLL(None)
    while True:
        held.sleep(_LONG_S)


INJECTORS: Mapping[str, Callable[[str], None]] = {
    "exception": _exception,
    "memory": _memory,
    "hang": _hang,
    "lock": _lock,
    "queue": _queue,
    "socket": _socket,
    "child": _child,
    "sigkill": _signal(signal.SIGKILL),
    "sigterm": _signal(signal.SIGTERM),
    "sigstop": _signal(signal.SIGSTOP),
    "segfault": _segfault,
    "abort": _abort,
    "exit": _exit,
    "gil": _gil,
}


def inject(kind: str, text: str) -> None:
    """Do the harm; returns only from a signal that the process survives or is woken from. `text`: for exceptions."""
    INJECTORS[kind](text)
