"""The progress page: a worker's life signs in shared memory, readable without its help.

The worker stores, the agent loads; each field is one aligned 8-byte word, so that no reader sees half a value. A store
is one `struct.pack_into` (< 1 µs). The page is a memfd that the agent made and holds. Behind its words lie those of the
rank's monitor (`monitor.py`), and behind them a worker that cannot speak any more writes its stacks (`stacks.py`).
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from everstep.process import monitor

_FORMAT = struct.Struct("=14q")
SIZE = monitor.AT + monitor.SIZE
_WORD = struct.Struct("=q")
_NAME_AT, _NAME_BYTES = _FORMAT.size, 48
_STEP, _MARK, _AUTO, _PHASE, _LIMIT, _GENERATION, _STARTED, _FROM, _MOVED, _PINGED = range(10)
_UNDECLARED, _TURNS, _TURNED, _PLACES = range(10, 14)


class Phase:
    """What the worker says it is doing; small numbers on the page."""

    NONE = 0  # not inside a wrapped function: no limit applies
    FIRST = 1  # set-up and the first step of a generation
    STEP = 2
    DECLARED = 3  # run.phase(): its own limit, or none
    PAUSED = 4
    WAITING = 5  # arrived or completed; waits for the others
    AFTER = 6  # the loop of steps is left, the function goes on
    NAMES = ("none", "first step", "step", "declared phase", "paused", "waiting", "after the loop")
    WORDS: ClassVar[Mapping[int, str]] = {
        NONE: "none",
        FIRST: "first",
        STEP: "step",
        DECLARED: "declared",
        PAUSED: "paused",
        WAITING: "waiting",
        AFTER: "after",
    }
    """As whoever judges silence knows them."""


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
    moved_s: float = 0.0  # when the main thread was last seen to execute bytecode
    pinged: bool = False  # `ping` was called in this generation: it will be again
    undeclared: bool = False  # its function says nothing of its steps
    turns: int = 0  # of the function's loop, as far as they can be seen
    turned_s: float = 0.0  # the last of them
    places: int = 0  # at which the main thread was seen since its last sign of progress


class Page:
    """The mapped page. One writer (the worker), any number of readers."""

    def __init__(self, fd: int, *, stacks: bool = False) -> None:
        """Map `fd`, which may be closed afterwards; with `stacks`, keep a descriptor to write them with."""
        self._map = mmap.mmap(fd, SIZE)
        self.monitor = monitor.Monitor(self._map)
        self._generation = memoryview(self._map)[_GENERATION * 8 : (_GENERATION + 1) * 8].cast("q")
        self.stacks_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC) if stacks else -1

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
        for word in (_PINGED, _UNDECLARED, _TURNS, _TURNED, _PLACES):
            self._put(word, 0)
        self._put(_FROM, _WORD.unpack_from(self._map, _STEP * 8)[0])  # until it is known better
        self.phase(Phase.FIRST, now)

    def began(self, generation: int, now: float) -> None:
        """A script that declares nothing begins in this generation: no limit applies but those of its monitor."""
        self._put(_STARTED, int(now * 1e9))
        self._put(_GENERATION, generation)

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

    def ping(self, now: float) -> None:
        """A sign of progress from inside a step; from here on the reader expects more of them."""
        self._put(_PINGED, 1)
        self._put(_MARK, int(now * 1e9))

    def undeclared(self, now: float) -> None:
        """What follows says nothing of its steps: silence is judged by what can be seen of its loop."""
        self._put(_UNDECLARED, 1)
        self.phase(Phase.STEP, now)

    def turned(self, turns: int, now: float) -> None:
        """The function's loop has turned so often."""
        self._put(_TURNED, int(now * 1e9))
        self._put(_TURNS, turns)

    def seen(self, places: int) -> None:
        """At so many places the main thread was seen since its last sign of progress. From the ticking thread."""
        self._put(_PLACES, places)

    def moved(self, now: float) -> None:
        """The main thread has executed bytecode: the automatic sign (H4). From the ticking thread."""
        self._put(_MOVED, int(now * 1e9))

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
        words = _FORMAT.unpack_from(self._map, 0)
        step, mark, auto, phase, limit, generation, started, first, moved, pinged = words[:10]
        undeclared, turns, turned, places = words[10:]
        name = self._map[_NAME_AT : _NAME_AT + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
        return Reading(
            step, mark / 1e9, auto / 1e9, phase, limit / 1e9, generation, started / 1e9, first, name, moved / 1e9,
            bool(pinged), bool(undeclared), turns, turned / 1e9, places,
        )  # fmt: skip

    @property
    def progress(self) -> tuple[int, int]:
        """Changes with each sign of progress."""
        mark, turned = (_WORD.unpack_from(self._map, word * 8)[0] for word in (_MARK, _TURNED))
        return mark, turned

    @property
    def generation(self) -> int:
        """The generation that was entered last."""
        return self._generation[0]

    def close(self) -> None:
        """Unmap."""
        self.monitor.release()
        self._generation.release()
        self._map.close()
        if self.stacks_fd >= 0:
            os.close(self.stacks_fd)
            self.stacks_fd = -1
