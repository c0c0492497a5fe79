"""The zygote as its agent holds it: one at a time, and a successor for one that is gone.

Rule 1: exec'd before any descriptor of ours that matters is open (Z4); a successor inherits nothing but its own line.
Rule 2: a successor is told all that the first was told, and whose sessions it has to end should we go (LA-06).
Rule 3: MOST_DEATHS in a row without a birth in between, and none follows: `barren` says so, once.
Rule 4: no wait without a deadline: one that does not become ready, or leaves an order undone, is killed.
"""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.errors import ConfigurationError, EverstepError
from everstep.process import kernel, mark
from everstep.process.loop import Loop, Timer
from everstep.recovery.line import Line
from everstep.recovery.link import Link

MOST_DEATHS = 3
READY_S = 600.0  # imports from a cold, slow file system included
BIRTH_S = 30.0
RETRY_S = 1.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


OWN = dict.fromkeys(THREAD_VARIABLES, "1") | {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() makes no CUDA context
}
"""Variables of the zygote itself: what it loads reads them."""


class Refused(EverstepError):
    """The zygote ended the job before it began: a wrong flag, or `--help` (then the text is empty)."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Family(Protocol):
    """Whoever orders children of a zygote, and hears of them."""

    job: str
    environment: dict[str, str]

    def started(self, pid: int) -> None:
        """A zygote has been exec'd."""
        ...

    def forked(self, number: int, pid: int) -> None:
        """The child of an order is there, and waits for its `go`."""
        ...

    def unborn(self, number: int, why: str) -> None:
        """The child of an order could not be forked."""
        ...

    def ready(self) -> None:
        """Orders are taken from here on (again)."""
        ...

    def orphaned(self, status: int) -> Sequence[int]:
        """The zygote is gone, and another is on its way; return the sessions that it must know."""
        ...

    def barren(self, why: str) -> None:
        """No zygote will come any more."""
        ...

    def notice(self, text: str) -> None:
        """A zygote has a word for the operator."""
        ...


class Zygotes:
    """The present zygote and its successors."""

    def __init__(self, loop: Loop, family: Family, reap: Callable[[], None], agent: int) -> None:
        self._loop, self._family, self._reap, self._agent = loop, family, reap, agent
        self._popen: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._said: list[dict[str, Any]] = []
        self._openings: list[Mapping[str, Any]] = []
        self._deaths = 0
        self._reason = ""
        self._timer: Timer | None = None
        self._asked = 0  # orders that have not been answered
        self.files: tuple[int, int] | None = None  # the limit that the job was started with: its processes keep it
        self.taking_orders = False
        self.last = False  # no successor is wanted

    @property
    def pid(self) -> int:
        """Of the present zygote; 0 where there is none."""
        return self._popen.pid if self._popen is not None and self._popen.returncode is None else 0

    def start(self) -> None:
        """Exec a zygote."""
        link, theirs = Link.pair()
        words = [str(theirs.fileno()), self._family.job, str(self._agent)]
        command = [sys.executable, "-m", "everstep.launcher.zygote", *words]
        environment = self._family.environment | OWN | mark.words(self._family.job)
        try:
            self._popen = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
                # Workers read what torchrun's would; a terminal they could not, being in sessions of their own.
                stdin=subprocess.DEVNULL if os.isatty(0) else None,
            )
        finally:
            theirs.close()
        if self.files is not None:
            resource.prlimit(self._popen.pid, resource.RLIMIT_NOFILE, self.files)
        self._line, self._asked = Line(self._loop, link, self._heard), 0
        self._family.started(self._popen.pid)

    def ask(self, message: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Send, and serve until the zygote says `answer`. Raises Refused, or ConfigurationError when it dies."""
        assert self._line is not None
        assert self._popen is not None
        self._openings.append(message)
        self._line.send(message)
        self._limit(READY_S)
        while True:
            for said in self._said:
                if said["kind"] == "zygote.refused":
                    raise Refused(said["text"], said["code"])
                if said["kind"] == answer:
                    self._said.remove(said)
                    self._unlimit()
                    return said
            if self._popen.returncode is not None:
                raise ConfigurationError(
                    f"the zygote ended with status {self._popen.returncode} before the job began; "
                    f"what it printed stands above. {self._reason}".rstrip()
                )
            self._loop.later(0.5, self._reap)
            self._loop.turn()

    def order(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Have a child forked; the answer comes as `forked` or `unborn`, or the zygote is killed for it."""
        if self._line is not None:
            self._line.send(message, fds)
            self._asked += 1
            self._limit(BIRTH_S)

    def forget(self, pid: int) -> None:
        """A session has been ended by us."""
        if self._line is not None and self.taking_orders:
            self._line.send({"kind": "zygote.forget", "pid": pid})

    def _heard(self, message: dict[str, Any], fds: list[int]) -> None:
        del fds
        match message["kind"]:
            case "zygote.forked":
                self._deaths = 0
                self._answered()
                self._family.forked(message["order"], message["pid"])
            case "zygote.unborn":
                self._answered()
                self._family.unborn(message["order"], message["text"])
            case "zygote.notice":
                self._family.notice(message["text"])
            case "zygote.ready":
                self._said.append(message)
                self._unlimit()
                self.taking_orders = True
                self._family.ready()
            case "zygote.refused" if self._deaths:
                self._reason = str(message["text"])
            case _:
                self._said.append(message)

    def _answered(self) -> None:
        self._asked -= 1
        if self._asked:
            self._limit(BIRTH_S)
        else:
            self._unlimit()

    def gone(self, pid: int, status: int) -> bool:
        """Hear of a death; True when it was the zygote's."""
        if self._popen is None or pid != self._popen.pid:
            return False
        self._popen.returncode = status
        self._unlimit()
        began = self.taking_orders or self._deaths > 0
        self.taking_orders = False
        if self._line is not None:
            self._line.close()  # reads what it still said: births are not forgotten
            self._line = None
        if began and not self.last:  # before the job has begun, `ask` sees it
            self._follow(status, self._family.orphaned(status))
        return True

    def _follow(self, status: int, sessions: Sequence[int]) -> None:
        self._deaths += 1
        if self._deaths > MOST_DEATHS:
            end = f"signal {-status}" if status < 0 else f"status {status}"
            self._family.barren(
                f"the zygote ended {self._deaths} times in a row, last by {end}. {self._reason}".strip()
            )
            return
        try:
            self.start()
        except OSError as error:
            self._reason = f"It cannot be exec'd: {error.strerror}."
            self._loop.later(RETRY_S, lambda: self._follow(status, sessions))
            return
        assert self._line is not None
        for message in self._openings:
            self._line.send(message)
        self._line.send({"kind": "zygote.adopt", "pids": list(sessions)})
        self._limit(READY_S)

    def _limit(self, seconds: float) -> None:
        self._unlimit()
        popen = self._popen
        self._timer = self._loop.later(seconds, lambda: self._too_late(popen, seconds))

    def _unlimit(self) -> None:
        if self._timer is not None:
            self._timer.call = None
            self._timer = None

    def _too_late(self, popen: subprocess.Popen[bytes] | None, seconds: float) -> None:
        if popen is not None and popen is self._popen and popen.returncode is None:
            self._reason = f"It was killed: it did not answer for {seconds:g} s."
            kernel.kill(popen.pid)

    def close(self) -> None:
        """End the zygote; its death is the caller's to reap."""
        self.last = True
        self._unlimit()
        if self._line is not None:
            self._line.close()
            self._line = None
        if self.pid:
            with contextlib.suppress(OSError):
                kernel.kill(self.pid)
