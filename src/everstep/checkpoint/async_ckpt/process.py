"""The trainer's side of a worker's process: starting it, giving it calls, hearing how each ended.

Nothing here waits without looking: a worker that dies closes its line, and all that it had been given has failed, by
its exit status (W41, W42).
"""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.checkpoint.async_ckpt.worker import told
from everstep.clock import SYSTEM, Clock
from everstep.recovery.link import Link, LinkClosed

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from everstep.checkpoint.async_ckpt.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


_REAP_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended. `text` says why, where it failed."""

    text: str | None = None
    trace: str = ""

    @property
    def failed(self) -> bool:
        """True where what was asked for is not there."""
        return self.text is not None


class Job(Protocol):
    """What can be done in a worker's process, or here."""

    def message(self) -> tuple[dict[str, Any], list[int]]:
        """Return what the worker is sent; the descriptors are closed once they are sent."""
        ...

    def __call__(self) -> None:
        """Do it here."""
        ...

    def done(self, outcome: Outcome) -> None:
        """Give memory back, and after a failure take away what was half written."""
        ...


class Saver:
    """One worker's process. Used on the thread that saves; `kill` on any."""

    def __init__(self, nice: int | None = 10, io: int | None = None, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._owner = os.getpid()
        self._link, theirs = Link.pair()
        environment_path = json.dumps(sys.path, default=str)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), str(self._owner), environment_path],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self.abandoned = False  # nobody asks any more; what it was given is seen to its end
        self._outcomes: dict[int, Outcome] = {}
        self._given: dict[int, Any] = {}
        SAVERS.add(self)
        self._say({"kind": "settle", "nice": nice, "io": io}, [])

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ours(self) -> bool:
        """False in a forked child of the trainer: it holds a copy of this object, and not of the process."""
        return os.getpid() == self._owner

    @property
    def alive(self) -> bool:
        """True while it can be given calls."""
        return self._process.poll() is None

    @property
    def given(self) -> list[Any]:
        """The holders of what it was given and nobody has seen to yet."""
        return list(self._given.values())

    def give(self, idx: int, job: Job, holder: Any = None) -> None:
        """Have it do `job`, after all that it was given before. `holder` lives until that is forgotten."""
        message, fds = job.message()
        self._given[idx] = holder
        try:
            self._say(message | {"idx": idx}, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def outcome(self, idx: int, timeout_s: float | None = 0.0) -> Outcome | None:
        """Return how a call ended; None where it goes on, after `timeout_s` (None: as long as it takes)."""
        until = None if timeout_s is None else self._clock.now() + timeout_s
        while idx not in self._outcomes:
            left = None if until is None else max(0.0, until - self._clock.now())
            if not self._hear(left):
                return None
        return self._outcomes[idx]

    def forget(self, idx: int) -> None:
        """The outcome has been read."""
        self._outcomes.pop(idx, None)
        self._given.pop(idx, None)

    def end(self) -> None:
        """Let it go: it has nothing to do, or its work is not wanted any more."""
        self.kill()
        SAVERS.discard(self)
        if self.ours:
            self._link.close()

    def kill(self) -> None:
        """End it now. Any thread."""
        if not self.ours:
            return
        self._process.kill()
        self._reap()

    def _reap(self) -> int | None:
        """Wait for its end; None where it stands in a call to the kernel that nothing ends (a stuck disk)."""
        try:
            return self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return None

    def _say(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            self._link.send(message, fds)
        except LinkClosed:
            self._fail()

    def _hear(self, timeout_s: float | None) -> bool:
        """Take one answer; False where none came in time."""
        poll = select.poll()
        try:
            poll.register(self._link.fileno(), select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return False
            message, _ = self._link.receive()
        except (LinkClosed, OSError, ValueError):  # closed by an abort on another thread, too
            self._fail()
            return True
        failed = message["kind"] == "failed"
        text, trace = (message["text"], message["trace"]) if failed else (None, "")
        self._outcomes[message["idx"]] = Outcome(text, trace)
        return True

    def _fail(self) -> None:
        """It is gone: whatever it had been given and has not answered will never be done."""
        self._process.kill()  # its line is closed: it cannot be of use
        code = self._reap()
        how = "closed its line" if code is None else f"ended with exit status {code}"
        how = f"was ended by signal {-code}" if code is not None and code < 0 else how
        text = f"its worker's process {self.pid} {how} before it was done"
        for idx in set(self._given) - set(self._outcomes):
            self._outcomes[idx] = Outcome(text)


SAVERS: set[Saver] = set()
"""All that live: nothing of them is ever garbage, whose sockets and children Python ends in any order."""

__all__ = ["SAVERS", "Job", "Outcome", "Saver", "told"]
