"""Signals before there is anything to end in order: while flags are read, imports are done and other nodes awaited.

The kernel lets a signal that would end a process pass the first process of a container by, unless it has a handler.
"""

import contextlib
import signal
from collections.abc import Generator
from types import FrameType

_AS_SIGTERM = (signal.SIGUSR1,)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, *_AS_SIGTERM)


class Asked(BaseException):
    """The end is asked for before the job has begun."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name
        self.number = int(signal.SIGTERM) if number in _AS_SIGTERM else number


def _ask(number: int, frame: FrameType | None) -> None:
    del frame
    raise Asked(number)


@contextlib.contextmanager
def heard() -> Generator[None]:
    """Raise Asked in the main thread when one comes; whoever handles them later takes them over. Twice is once."""
    for number in _SIGNALS:
        signal.signal(number, _ask)
    try:
        yield
    finally:
        deaf()


def deaf() -> None:
    """We are ending as fast as can be, whatever else comes."""
    for number in (signal.SIGINT, *_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
