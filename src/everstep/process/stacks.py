"""Where a process stands that cannot say so itself: its interpreter lock is held, or it is stopped.

`faulthandler` writes Python's stacks from a signal's handler in C, without the interpreter lock. They go behind the
words of the progress page: memory of the agent's, which it reads without the worker's help.

Rule 1: the signal is sent only to a process that said which one it listens to (a real-time signal ends any other), and
        only once it has been condemned: the handler walks other threads' frames while they may change.
Rule 2: a process that listens never stops listening: its agent may be about to send.
"""

import faulthandler
import os
import re
import signal

FIRST_SIGNAL = signal.SIGRTMIN + 8
MOST_BYTES = 16_384
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_WAITS = f"{os.sep}torch{os.sep}distributed{os.sep}"


def listen(fd: int) -> int:
    """Write all threads' stacks to `fd` whenever a signal comes; return its number, 0 where none is free."""
    if fd < 0:
        return 0
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


def main_thread(dumped: str) -> str:
    """Return the frames of the thread that the signal met, innermost last, in the form of a traceback's.

    That is the main thread, unless it keeps the signal from itself. Empty where nothing is written yet.
    """
    _, _, own = dumped.partition("Current thread ")
    frames = _FRAME.findall(own.partition("\n\n")[0])
    return "".join(f'  File "{file}", line {line}, in {name}\n' for file, line, name in reversed(frames))


def waits(stack: str) -> bool:
    """Tell whether the innermost frame of a stack waits for other ranks: it is a victim then, not a culprit."""
    return _WAITS in stack.rstrip("\n").rpartition("\n")[2]
