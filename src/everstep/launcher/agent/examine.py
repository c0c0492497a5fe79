"""Evidence of a condemned rank: where it stands, taken from outside before anything is done about it.

A rank that hears us has told its Python stack. One that does not is made to write it by a signal's handler in C
(`process.stacks`). Where py-spy is installed its native stack is taken as well, early: when a rank is near its limit,
so that an interrupt never waits for it.

Rule 1: nothing blocks: what takes time is a process of its own, with a deadline, and is read by the loop.
Rule 2: evidence that cannot be had is left out; it is never a reason to fail, nor to wait longer than `NATIVE_S`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep import environ
from everstep.launcher.agent.spy import find_spy
from everstep.launcher.agent.worker import Worker
from everstep.launcher.core.limits import Verdict
from everstep.process import kernel, stacks
from everstep.process.loop import Loop
from everstep.process.page import SIZE

DUMP_S = 0.5  # until a handler in C must have run
_SETTLES_S = 0.02  # what has not grown for so long is whole
NATIVE_S = 3.0
MOST_BYTES = 32_768
Then = Callable[[Worker, Verdict, str], None]
"""(worker, verdict, evidence): go on."""


@dataclass(eq=False)
class _Native:
    """One run of py-spy."""

    worker: Worker
    pid: int
    fd: int
    until_s: float
    found: bytearray = field(default_factory=bytearray)
    over: bool = False


class Examiner:
    """Examines the workers of one agent; all on the loop's thread."""

    def __init__(self, loop: Loop, spy: str | None = None) -> None:
        """`spy`: the path of py-spy; where none is given it is looked for beside the interpreter and in PATH."""
        self._loop = loop
        self._spy = spy if spy is not None else find_spy()
        self._natives: dict[int, _Native] = {}
        self.busy = False
        """A rank has been condemned, and its evidence is on its way."""

    def near(self, worker: Worker) -> None:
        """It is near its limit: begin to take its native stack."""
        pid = worker.process.pid
        if not self._spy or pid in self._natives:
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        actions = [
            (os.POSIX_SPAWN_DUP2, nowhere, 0),
            (os.POSIX_SPAWN_DUP2, theirs, 1),
            (os.POSIX_SPAWN_DUP2, nowhere, 2),
        ]
        command = [self._spy, "dump", "--native", "--pid", str(pid)]
        try:
            spy = os.posix_spawn(self._spy, command, environ.snapshot(), file_actions=actions)
        except OSError:  # gone, or no memory: rule 2
            os.close(ours)
            return
        finally:
            os.close(theirs)
            os.close(nowhere)
        worker.held = True
        native = self._natives[pid] = _Native(worker, spy, ours, self._loop.clock.now() + NATIVE_S)
        self._loop.watch(ours, lambda: self._read(native))
        self._loop.later(NATIVE_S, lambda: self._end(native))

    def far(self, worker: Worker) -> None:
        """Its silence has ended: what was taken is of no use."""
        native = self._natives.get(worker.process.pid)
        if native is not None and native.over:
            del self._natives[worker.process.pid]

    def conclude(self, worker: Worker, verdict: Verdict, then: Then) -> None:
        """It is condemned: gather the evidence, and go on. At once for who has told its stack."""
        if verdict.action != "kill":
            then(worker, verdict, self._evidence(worker, worker.stack))
            return
        self.busy = True
        stopped = (kernel.status(worker.process.pid) or _GONE).state in "Tt"
        writes = not stopped and worker.dump()
        until = self._loop.clock.now() + (DUMP_S if writes else 0.0)
        self._await(worker, until, "", lambda dumped: then(worker, verdict, self._evidence(worker, dumped)))

    def _await(self, worker: Worker, until: float, before: str, then: Callable[[str], None]) -> None:
        """Wait for the dump to be whole, and for py-spy; each has its deadline."""
        now, native = self._loop.clock.now(), self._natives.get(worker.process.pid)
        dumped = stacks.read(worker.page_fd, SIZE) if worker.dump_by and worker.last is None else ""
        writes = now < until and worker.last is None and (not dumped or dumped != before)
        if writes or (native is not None and not native.over):
            self._loop.later(_SETTLES_S, lambda: self._await(worker, until, dumped, then))
            return
        self.busy = False
        then(dumped)

    def _evidence(self, worker: Worker, stack: str) -> str:
        native = self._natives.pop(worker.process.pid, None)
        text = native.found.decode(errors="replace").strip() if native is not None and native.over else ""
        return "\n".join(part for part in (stack.rstrip(), f"native stack, by py-spy:\n{text}" if text else "") if part)

    def _read(self, native: _Native) -> None:
        try:
            got = os.read(native.fd, 65536)
        except BlockingIOError:
            return
        if got and len(native.found) < MOST_BYTES:
            native.found += got
        elif not got:
            native.over = True
            self._close(native)

    def _end(self, native: _Native) -> None:
        """Its deadline has passed."""
        if native.fd >= 0:
            kernel.kill(native.pid)
            native.found.clear()
            native.over = True
            self._close(native)

    def _close(self, native: _Native) -> None:
        if native.fd >= 0:
            self._loop.unwatch(native.fd)
            os.close(native.fd)
            native.fd = -1
            native.worker.held = False


_GONE = kernel.Status("Z", 0, 0, 0.0, 0)
