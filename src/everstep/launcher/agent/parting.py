"""How the workers of an unwrapped script are ended for a restart: as torchrun ends them, in as little time.

Rule 1: who has no handler of its own for SIGTERM is killed at once: the signal would do no more.
Rule 2: who has one gets SIGTERM, and its time: for as long as it uses the processor, at most `limit_s` (the grace
        time). One that has used next to none for `IDLE_S` does not come to its handler, for it waits in C++ for ranks
        that are gone; it is killed (torchrun waits 30 s for it).
"""

import signal
from collections.abc import Callable

from everstep.launcher.agent.process import Process
from everstep.process import kernel
from everstep.process.loop import Loop

LOOK_S = 0.1
IDLE_S = 3.0
ENOUGH_S = 0.01
"""CPU time between two looks that says that it is at work."""
LONGEST_S = 60.0


class Parting:
    """Ends processes; one thread, the agent's."""

    def __init__(self, loop: Loop, limit_s: float, notice: Callable[[str], None]) -> None:
        self._loop, self._limit_s, self._notice = loop, min(limit_s, LONGEST_S), notice

    def end(self, process: Process, *, failed: bool = False) -> None:
        """Have it end; its death comes to `on_exit` as every other. `failed`: by its own fault it is on its way out."""
        if failed or not kernel.catches(process.pid, signal.SIGTERM):
            process.end()
            return
        process.end(signal.SIGTERM)
        now = self._loop.clock.now()
        self._wait(process, 0.0, now, now + self._limit_s)

    def _wait(self, process: Process, used_s: float, since: float, until: float) -> None:
        stat = kernel.status(process.pid)
        if process.gone or stat is None or stat.ending:
            return
        now = self._loop.clock.now()
        if stat.cpu_s - used_s >= ENOUGH_S:
            used_s, since = stat.cpu_s, now
        if now >= until or now - since >= IDLE_S:
            why = f"{self._limit_s:g} s" if now >= until else f"{IDLE_S:g} s without using the processor"
            self._notice(f"{process.name} (pid {process.pid}) is killed: SIGTERM has not ended it in {why}")
            process.kill()
            return
        self._loop.later(LOOK_S, lambda: self._wait(process, used_s, since, until))
