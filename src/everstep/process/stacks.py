"""Where a process stands that cannot say so itself: its interpreter lock is held, or it is stopped.

`faulthandler` writes Python's stacks from a signal's handler in C, without the interpreter lock. They go behind the
words of the progress page: memory of the agent's, which it reads without the worker's help.

Rule 1: the signal is sent only to a process that said which one it listens to (a real-time signal ends any other), and
        only once it has been condemned: the handler walks other threads' frames while they may change.
Rule 2: a process that listens never stops listening: its agent may be about to send.
"""

import faulthandler
import os
import signal

FIRST_SIGNAL = signal.SIGRTMIN + 8
MOST_BYTES = 16_384


def listen(fd: int) -> int:
    """Write all threads' stacks to `fd` whenever a signal comes; return its number, 0 where none is free."""
    for number in range(FIRST_SIGNAL, signal.SIGRTMAX + 1):
        if signal.getsignal(number) is signal.SIG_DFL:
            faulthandler.register(number, file=fd, all_threads=True, chain=False)
            return number
    return 0


def clear(fd: int, at: int) -> None:
    """Forget what was written behind `at`."""
    os.ftruncate(fd, at)


def read(fd: int, at: int) -> str:
    """Return what has been written behind `at`, as far as it has come."""
    return os.pread(fd, MOST_BYTES, at).decode(errors="replace").strip("\0\n")
