"""The place between two steps at which a rank leaves a job that is asked to end. See `recovery.core.draining`.

    rank ◀─ drain.stand {generation}, drain.until {generation, step}
    rank ─▶ drain.stands {generation, begun}, drain.left {generation, step}

Threads: `heard` is called on the waiter thread, the others on the function's own. That one may be interrupted at any
moment, so it holds no lock that the waiter needs.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from everstep.errors import JobDrained
from everstep.recovery.core.draining import Answer, Gate

LOOK_S = 1.0


class _Here:
    """Where this rank stands, in one generation."""

    def __init__(self, generation: int) -> None:
        self.generation, self.gate = generation, Gate()
        self.told = threading.Lock()  # released when the last step is known
        self.told.acquire()


class Boundary:
    """Of one process, from one generation to the next."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._here = _Here(-1)
        self._said: deque[Mapping[str, Any]] = deque()

    def enter(self, generation: int) -> None:
        """A generation begins; what the agent has said of it already is heard now."""
        self._here = _Here(generation)
        self._hear()

    def heard(self, message: Mapping[str, Any]) -> None:
        """Hear the agent. What it says of an earlier generation is void, what it says of a later one waits."""
        self._said.append(message)
        self._hear()

    def _hear(self) -> None:
        while True:
            try:
                message = self._said.popleft()
            except IndexError:
                return
            about = int(message["generation"])
            if about > self._here.generation:
                self._said.appendleft(message)
                if about > self._here.generation:  # or else it was entered meanwhile
                    return
            elif about == self._here.generation:
                self._obey(self._here, message)

    def _obey(self, here: _Here, message: Mapping[str, Any]) -> None:
        if message["kind"] == "drain.stand":
            begun = here.gate.stand()
            self._send({"kind": "drain.stands", "generation": here.generation, "begun": begun})
        elif message["kind"] == "drain.until":
            here.gate.until(int(message["step"]))
            with contextlib.suppress(RuntimeError):  # said twice
                here.told.release()

    def before(self, step: int) -> None:
        """`step` is next. Raises JobDrained where it shall not begin: the job ends with the step before it."""
        here = self._here
        while (answer := here.gate.before(step)) is Answer.WAIT:
            here.told.acquire(timeout=LOOK_S)
        if answer is Answer.LEAVE:
            self._send({"kind": "drain.left", "generation": here.generation, "step": step - 1})
            raise JobDrained(step - 1)
