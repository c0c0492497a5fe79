"""The progress page: a worker's life signs in shared memory, readable without its help.

The worker stores, the agent loads; each field is one aligned 8-byte word, so that no reader sees half a value. A store
is one `struct.pack_into` (< 1 µs). The page is a memfd that the agent made and holds.
"""

import mmap
import os
import struct
from dataclasses import dataclass

_FORMAT = struct.Struct("=8q")
SIZE = 4096
_WORD = struct.Struct("=q")
_NAME_AT, _NAME_BYTES = _FORMAT.size, 48
_STEP, _MARK, _AUTO, _PHASE, _LIMIT, _GENERATION, _STARTED, _FROM = range(8)


class Phase:
    """What the worker says it is doing; small numbers on the page."""

    NONE = 0  # not inside a wrapped function: no limit applies
    FIRST = 1  # set-up and the first step of a generation
    STEP = 2
    DECLARED = 3  # run.phase(): its own limit, or none
    PAUSED = 4
    WAITING = 5  # arrived or completed; waits for the others
    NAMES = ("none", "first step", "step", "declared phase", "paused", "waiting")


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a page. Times are monotonic seconds; 0 where never set."""

    step: int  # steps done
    mark_s: float  # last sign of progress (a step, a ping, a change of phase)
    auto_s: float  # last tick of the worker's own ticking thread
    phase: int
    limit_s: float  # the declared phase's own limit; 0: none
    generation: int
    started_s: float  # when this generation was entered
    from_step: int = 0  # after which this generation goes on
    name: str = ""  # of a declared phase; only for people: a reader may see half of it


class Page:
    """The mapped page. One writer (the worker), any number of readers."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)

    @staticmethod
    def create(name: str) -> int:
        """Return the descriptor of a new page; the caller owns it."""
        fd = os.memfd_create(f"everstep-page-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return fd

    def _put(self, word: int, value: int) -> None:
        _WORD.pack_into(self._map, word * 8, value)

    def enter(self, generation: int, now: float) -> None:
        """A generation begins: its first step has its own limit."""
        self._put(_STARTED, int(now * 1e9))
        self._put(_GENERATION, generation)
        self._put(_FROM, _WORD.unpack_from(self._map, _STEP * 8)[0])  # until it is known better
        self.phase(Phase.FIRST, now)

    def step_done(self, step: int, now: float) -> None:
        """`step` is done and the next begins."""
        self._put(_STEP, step)
        self._put(_MARK, int(now * 1e9))
        self._put(_PHASE, Phase.STEP)

    def resumed(self, step: int, now: float) -> None:
        """A generation goes on after `step`; its first step still has its own limit."""
        self._put(_FROM, step)
        self._put(_STEP, step)
        self._put(_MARK, int(now * 1e9))

    def mark(self, now: float) -> None:
        """A sign of progress."""
        self._put(_MARK, int(now * 1e9))

    def tick(self, now: float) -> None:
        """The worker's ticking thread ran: the interpreter lock is not held for ever."""
        self._put(_AUTO, int(now * 1e9))

    def phase(self, phase: int, now: float, limit_s: float = 0.0, name: str = "") -> None:
        """Say what this worker does from here on."""
        self._map[_NAME_AT : _NAME_AT + _NAME_BYTES] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        self._put(_LIMIT, int(limit_s * 1e9))
        self._put(_MARK, int(now * 1e9))
        self._put(_PHASE, phase)

    def read(self) -> Reading:
        """Return all fields."""
        step, mark, auto, phase, limit, generation, started, first = _FORMAT.unpack_from(self._map, 0)
        name = self._map[_NAME_AT : _NAME_AT + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
        return Reading(step, mark / 1e9, auto / 1e9, phase, limit / 1e9, generation, started / 1e9, first, name)

    @property
    def generation(self) -> int:
        """The generation that was entered last."""
        return int(_WORD.unpack_from(self._map, _GENERATION * 8)[0])

    def close(self) -> None:
        """Unmap."""
        self._map.close()
