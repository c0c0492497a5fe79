"""Signals that a scheduler sends to every process of a job, not to the agent alone: the agent decides what they mean.

Slurm signals all processes of a step (`scancel`, the time limit, `--signal`), and a rank that dies of it in its step
cannot end it. A handler of the script's own is left alone; so is every child.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

from everstep import environ

STEP = "SLURM_STEP_ID"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def shielded() -> Generator[None]:
    """Let those signals pass this process by, under Slurm, where they would end it. Main thread; elsewhere: nothing."""
    if environ.get(STEP) is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    me = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != me:  # a child that was forked: it ends as it always did
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is hear:
                signal.signal(number, signal.SIG_DFL)
