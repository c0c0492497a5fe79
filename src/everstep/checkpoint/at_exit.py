"""What becomes of a Checkpointer that nobody closes: it finishes what was begun, within a grace, when the process ends.

Registered when this module is loaded, so that it runs after whatever a script registers later. A save that failed, and
that nobody has been told of by then, makes the exit code 1: a script that ends well has saved what it meant to (CS-37).
"""

import atexit
import logging
import os
import sys
import weakref
from typing import Protocol

from everstep.errors import ExitCode
from everstep.telemetry import say


class Closer(Protocol):
    """What is to be closed."""

    def at_exit(self) -> str:
        """Finish; return what went wrong, or nothing."""
        ...


_open: "weakref.WeakSet[Closer]" = weakref.WeakSet()


def add(one: Closer) -> None:
    """Close it at the end of the process, unless it is closed before."""
    _open.add(one)


def discard(one: Closer) -> None:
    """It is closed."""
    _open.discard(one)


@atexit.register
def _close_all() -> None:
    failures = [text for one in list(_open) if (text := one.at_exit())]
    if not failures:
        return
    for text in failures:
        say(f"nobody closed the Checkpointer, and a checkpoint is missing: {text}")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(int(ExitCode.FAILED))
