"""Whether the thread of the wrapped call runs: the automatic sign of progress (H4).

The main thread is asked for bytecode. Pending calls run on no other, so of another thread its CPU clock is read (W15):
a thread that waits uses none. One that spins in C for ever looks as if it ran; `ping` sees that.

`Py_AddPendingCall` has the main thread call a C function at its next bytecode. Ours is libc's `sem_post`, which adds
one to a semaphore and is done: no Python runs, so nothing of it can be interrupted or raise in the user's code. A
thread of ours reads the count.

Rule 1: one call is on its way at most; the interpreter has room for 32, and they are everybody's.
Rule 2: the semaphore is never freed: a call may be on its way for as long as the process lives.
What it cannot see: a signal handler written in Python also executes bytecode. A rank that sleeps and is woken by a
timer of the user's, more often than the limit, looks as if it ran.
"""

import ctypes
import threading
from types import CodeType, FrameType
from typing import Any, ClassVar, Protocol

from everstep.clock import cpu_of

_SEM_BYTES = 64  # sem_t has 32 on 64-bit Linux
_libc = ctypes.PyDLL(None)  # keeps the interpreter lock: taking it back from a busy thread costs up to 5 ms
_libc.sem_post.argtypes = [ctypes.c_void_p]
_libc.sem_getvalue.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
_libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_add_pending_call: Any = ctypes.pythonapi["Py_AddPendingCall"]  # a function object of our own: its types are ours
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]


class Sign(Protocol):
    """Tells whether a thread has run."""

    def beat(self) -> bool:
        """Tell whether it has run since the last beat."""
        ...


class Pulse:
    """Asks the main thread for signs, and counts them. For one thread, and not the main one."""

    _kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(_SEM_BYTES)
        Pulse._kept.append(self._semaphore)  # rule 2
        _libc.sem_init(self._semaphore, 0, 0)
        self._address = ctypes.addressof(self._semaphore)
        self._post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
        self._asked = self._seen = 0

    def beat(self) -> bool:
        """Tell whether the main thread has executed bytecode since the last beat, and ask again."""
        count = self._count()
        ran, self._seen = count != self._seen, count
        if count == self._asked and _add_pending_call(self._post, self._address) == 0:
            self._asked += 1
        return ran

    def _count(self) -> int:
        value = ctypes.c_int()
        _libc.sem_getvalue(self._address, ctypes.byref(value))
        return value.value


EFFORT_S = 200e-6
"""Less is no sign: whoever looks at a stack from outside stops the thread for it, which costs the thread 20 µs."""


class Effort:
    """Reads the CPU clock of a thread that lives as long as this is asked. For any one thread."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._used = cpu_of(thread)

    def beat(self) -> bool:
        """Tell whether the thread has used some CPU since it last did. What looks up once a second does."""
        used = cpu_of(self._thread)
        if used - self._used < EFFORT_S:
            return False
        self._used = used
        return True


def of(thread: int) -> Sign:
    """Return what tells of a thread; `thread` is its `get_ident()`."""
    return Pulse() if thread == threading.main_thread().ident else Effort(thread)


class Places:
    """At how many lines a thread was seen since its last sign of progress: one that loops for ever is at few."""

    MOST = 64

    def __init__(self) -> None:
        self._lines: set[tuple[CodeType, int]] = set()
        self._progress: object = None

    def look(self, progress: object, frame: FrameType | None) -> int:
        """Take in where it is now; `progress` changes with each sign. Keeps no frame; counts up to `MOST`."""
        if progress != self._progress:
            self._progress = progress
            self._lines.clear()
        if frame is not None and len(self._lines) < self.MOST:
            self._lines.add((frame.f_code, frame.f_lineno))
        return len(self._lines)
