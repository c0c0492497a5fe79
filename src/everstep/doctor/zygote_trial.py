"""A zygote as a job starts it, asked to be ready and then to end: whether this environment allows one.

Started and asked on the main thread: the zygote ends with the thread that began it.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

from everstep import environ
from everstep.clock import SYSTEM, Clock
from everstep.launcher.agent.zygotes import THREAD_VARIABLES
from everstep.process import mark
from everstep.recovery.link import Link, LinkClosed

_END_S = 5.0


@dataclass
class _Said:
    """What it has told so far."""

    ready: bool = False
    trouble: str = ""
    notices: list[str] = field(default_factory=list[str])


class ZygoteTrial:
    """One zygote, which has been started when this returns, where a process can be."""

    def __init__(self, limit_s: float, clock: Clock = SYSTEM) -> None:
        self._clock, self._limit_s, self._until = clock, limit_s, clock.now() + limit_s
        self._job = f"doctor-{secrets.token_hex(4)}"
        self._link, theirs = Link.pair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `collect`
        threads = dict.fromkeys(THREAD_VARIABLES, "1")
        self._popen: subprocess.Popen[bytes] | None = None
        self._unborn = ""
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "everstep.launcher.zygote", str(theirs.fileno()), self._job, str(os.getpid())],
                env=environ.snapshot() | threads | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | mark.words(self._job),
                pass_fds=[theirs.fileno()],
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
            )
        except OSError as error:
            self._unborn = f"no process can be started: {error.strerror}"
        finally:
            theirs.close()

    def collect(self) -> tuple[str, list[str]]:
        """Wait until it is ready, end it, and return why it cannot be (or nothing), and what it had to say."""
        said = _Said(trouble=self._unborn)
        try:
            if not said.trouble:
                self._ask(said)
        except LinkClosed:
            said.trouble = said.trouble or f"it ended before it was ready{self._last_words()}"
        finally:
            self._end()
        return said.trouble, said.notices

    def _ask(self, said: _Said) -> None:
        self._link.send({"argv": ["doctor.py"], "extensions": []})
        self._link.send({"preload": []})
        while not said.ready and not said.trouble:
            self._hear(said)
        self._link.send({"kind": "zygote.end"})

    def _hear(self, said: _Said) -> None:
        left = self._until - self._clock.now()
        if left <= 0:
            said.trouble = f"not ready within {self._limit_s:g} s"
            return
        self._link.patience(max(1, int(left)))
        try:
            message, _ = self._link.receive()
        except BlockingIOError:
            return
        match message["kind"]:
            case "zygote.ready":
                said.ready = True
            case "zygote.refused":
                said.trouble = str(message["text"]) or "refused without a word"
            case "zygote.notice":
                said.notices.append(str(message["text"]))
            case _:  # how it read the command line
                pass

    def _last_words(self) -> str:
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in printed if line.strip()]
        return f": {words[-1]}" if words else ""

    def _end(self) -> None:
        """It ends with its line; what does not is killed, with all that it has forked."""
        self._link.close()
        self._printed.close()
        if self._popen is None:
            return
        late = self._clock.now() >= self._until
        try:
            self._popen.wait(0 if late else _END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            mark.kill(self._job)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                self._popen.wait(_END_S)
