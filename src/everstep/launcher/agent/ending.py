"""How a job ends on its node: everybody is asked or killed, and nobody is waited for beyond a limit.

What companions still have outstanding (a checkpoint that is being written) is waited for too, within the grace time.
"""

from collections.abc import Callable

from everstep.errors import ExitCode
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.nursery import Nursery
from everstep.process.loop import Loop
from everstep.recovery.core import words

UNKILLABLE_S = 5.0
"""After SIGKILL: whoever waits inside the kernel for longer is left behind, and named."""
AGAIN_S = 1.0
"""A second signal within it is the same one, come by two ways (a terminal, and whoever wraps us)."""


class Ending:
    """The end, once it is decided."""

    def __init__(
        self,
        command: words.End,
        loop: Loop,
        nursery: Nursery,
        crew: Crew,
        grace_s: float,
        notice: Callable[[str, str], None],
        drained: Callable[[], bool],
        *,
        strict: bool = False,
    ) -> None:
        """`strict`: with the grace time ends the wait for storage too; else it has `UNKILLABLE_S` more."""
        self.code, self.reason = command.code, command.reason
        self._loop, self._nursery, self._crew = loop, nursery, crew
        self._grace_s, self._notice, self._drained, self._strict = grace_s, notice, drained, strict
        self._began_s = loop.clock.now()

    def begin(self) -> None:
        """Let nobody be born, and end who lives: at once, or, where a signal was passed on to them, after the grace."""
        self._nursery.recall()
        self._crew.forget_births()
        for worker in self._crew:
            worker.process.expected_end = True
            if not worker.begun or self.code < ExitCode.SIGNALLED:
                worker.process.kill()
        self._loop.later(self._grace_s, self._kill_all)
        self.look()

    def again(self, name: str) -> None:
        """Another signal: whoever sends it does not want to wait."""
        if self._loop.clock.now() - self._began_s > AGAIN_S:
            self.hurry(name)

    def hurry(self, name: str) -> None:
        """Kill everybody, and wait for nothing."""
        self._notice(f"{name} again: everything is killed", "error")
        self._strict = True
        self._kill_all()

    def _kill_all(self) -> None:
        for worker in self._crew:
            worker.process.kill()
        self._loop.later(UNKILLABLE_S, self._loop.stop)
        if self._strict:
            self._drained = lambda: True
            self.look()

    def look(self) -> None:
        """It is over when no worker is left, and nothing is outstanding."""
        if not list(self._crew) and self._drained():
            self._loop.stop()
