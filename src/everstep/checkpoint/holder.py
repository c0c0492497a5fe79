"""Holds a job's checkpoint directory from its start to its end, in a process of its own: the agent never touches it.

A file system can take a call and never return (a server that is gone, a frozen device), and SIGKILL does not end such
a call. Whoever might make one is a process that nobody waits for beyond a limit: the writers, and this one. It claims
the directory, sweeps it, reads the newest checkpoint against its checksums, tells what it found, and keeps the claim
until its line closes.

    agent ◀─ {moving}        at most once a second while the directory answers
    agent ◀─ {stock} | {refused, code}
    agent ─▶ (the line closes)               the claim is given up

`Held` is the agent's side; `OwnHold` does the same in the caller's own process, for whoever may wait there.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from everstep import environ
from everstep.checkpoint.core import names
from everstep.checkpoint.core.findings import Findings
from everstep.checkpoint.series import settle
from everstep.checkpoint.stocktaking import take_stock
from everstep.checkpoint.storage import opening
from everstep.checkpoint.unreachable import Retry, deadline_s, unopened
from everstep.clock import SYSTEM, Clock
from everstep.errors import ConfigurationError, EverstepError, ExitCode, UnreachableStorage

SILENT_S = 60.0
"""A directory that says nothing for so long at the start is stuck: longer than a server's restart should take."""
CLOSE_S = 1.0
TELL_S = 1.0
OVER = b"e"


class Hold(Protocol):
    """A claim on a checkpoint directory as the disk tier sees it."""

    directory: str
    job: str
    lock: str
    over: bool
    """Whether the job has ended when this is closed; where it has several nodes, that is not so by itself."""

    def open(self, run: str, series: str | None = None) -> Findings:
        """Claim the directory, sweep it, and say what lies there.

        ConfigurationError where it cannot serve, UnreachableStorage where it does not answer. `series`: of which
        training it must be (series.py); None: that is not asked.
        """
        ...

    def go_on(self, job: str, run: str) -> None:
        """The node of `job` that has claimed it is gone: keep the claim in its stead. Never waits for the storage."""
        ...

    def close(self) -> None:
        """Give the claim up; never waits long. Also after an `open` that failed, and twice."""
        ...


class OwnHold:
    """The claim in this process: its calls wait for the storage. `several`: other nodes of the job go on without us."""

    def __init__(
        self,
        directory: str,
        job: str | None = None,
        clock: Clock = SYSTEM,
        moving: Callable[[], None] = lambda: None,
        *,
        several: bool = False,
    ) -> None:
        self.directory = opening.place_of(directory)
        self.job = job or secrets.token_hex(4)
        self._claim = opening.claim(self.directory, self.job, moving, clock, several=several)
        self.lock = self._claim.lock
        self._moving = moving
        self.over = not several

    def open(self, run: str, series: str | None = None) -> Findings:
        """See `Hold.open`."""
        told = self._claim.take(run)
        retry = Retry(deadline_s(), self._moving)
        own = "" if series is None else settle(self.directory, series, self.job, retry=retry)
        return replace(take_stock(self.directory, told, self._moving), series=own)

    def go_on(self, job: str, run: str) -> None:
        """See `Hold.go_on`."""
        self.job = job
        self._claim.go_on(job, run)

    def close(self) -> None:
        """See `Hold.close`."""
        self._claim.over = self.over
        self._claim.close()


class Held:
    """The claim in a process of its own."""

    def __init__(
        self, directory: str, clock: Clock = SYSTEM, silent_s: float = SILENT_S, *, several: bool = False
    ) -> None:
        self._several, self.over = several, not several
        self.directory, self.job = opening.place_of(directory), secrets.token_hex(4)
        remote = opening.is_url(self.directory)
        self.lock = "" if remote else os.path.join(self.directory, names.owner(self.job))
        if remote:
            silent_s += deadline_s()  # one call that does not answer is told by its own name
        self._clock, self._silent_s = clock, silent_s
        self._line: socket.socket | None = None
        self._pid = 0

    def open(self, run: str, series: str | None = None) -> Findings:
        """See `Hold.open`."""
        self._begin(run, {"series": series, "several": self._several})
        found = b""
        while True:
            message, found = self._hear(found)
            if "stock" in message:
                return Findings.from_json(message["stock"].encode())
            if "refused" in message:
                away = message["code"] == ExitCode.BAD_NODE
                raise (UnreachableStorage if away else ConfigurationError)(str(message["refused"]))

    def _begin(self, run: str, asked: Mapping[str, Any]) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            command = [sys.executable, "-m", "everstep.checkpoint.holder"]
            words = [str(theirs.fileno()), self.directory, self.job, run, json.dumps(asked)]
            self._pid = os.posix_spawn(sys.executable, [*command, *words], environ.snapshot())

    def go_on(self, job: str, run: str) -> None:
        """See `Hold.go_on`. Of a directory nothing is to be kept: the writers of every node hold its lock."""
        if opening.is_url(self.directory) and self._line is None:
            self.job = job
            self._begin(run, {"series": None, "several": self._several, "go_on": True})

    def _hear(self, found: bytes) -> tuple[Mapping[str, Any], bytes]:
        """Return the next thing that it says, and what has been read beyond it."""
        assert self._line is not None
        deadline = self._clock.now() + self._silent_s
        while b"\n" not in found:
            left = deadline - self._clock.now()
            if left <= 0 or not select.select([self._line], [], [], left)[0]:
                raise UnreachableStorage(
                    f"the checkpoint directory {self.directory} does not answer: nothing has come back from it for "
                    f"{self._silent_s:.0f} s. Its storage is stuck, or gone: see whether `ls` of it returns, mend the "
                    "mount, and start again; or give another --checkpoint-dir."
                )
            part = self._line.recv(65536)
            if not part:
                raise ConfigurationError(
                    f"the process that was to hold the checkpoint directory {self.directory} has ended without a word; "
                    "what it printed says why (memory, or a broken installation)"
                )
            found += part
        line, _, rest = found.partition(b"\n")
        return json.loads(line), rest

    def close(self) -> None:
        """See `Hold.close`. One that is stuck is left behind: its lock goes with it."""
        if self._line is None:
            return
        if self.over:
            with contextlib.suppress(OSError):
                self._line.send(OVER, socket.MSG_DONTWAIT)
        self._line.close()
        self._line = None
        deadline = self._clock.now() + CLOSE_S
        while not self._gone():
            if self._clock.now() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                return
            self._clock.sleep(0.002)

    def _gone(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] == self._pid
        except ChildProcessError:  # the agent reaps whatever has died
            return True


class _Voice:
    """The process's side of the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._next_s = 0.0

    def say(self, **message: object) -> None:
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)  # nobody is there any more

    def moving(self) -> None:
        if SYSTEM.now() >= self._next_s:
            self._next_s = SYSTEM.now() + TELL_S
            self.say(moving=True)


def main(fd: str, directory: str, job: str, run: str, asked: str) -> None:
    """Entry of the process."""
    wanted: Mapping[str, Any] = json.loads(asked)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # a terminal's, or a scheduler's: the agent decides
    line = socket.socket(fileno=int(fd))
    threading.Thread(target=_end_with, args=(line.fileno(),), name="everstep-holder-line", daemon=True).start()
    voice = _Voice(line)
    hold = OwnHold(directory, job, moving=voice.moving, several=wanted["several"])
    if wanted.get("go_on"):
        hold.go_on(job, run)
    else:
        _open(hold, voice, run, wanted["series"])
    while word := line.recv(1):
        hold.over = hold.over or word == OVER
    hold.close()
    os._exit(0)


def _open(hold: OwnHold, voice: _Voice, run: str, series: str | None) -> None:
    try:
        stock = hold.open(run, series)
    except EverstepError as error:
        voice.say(refused=str(error), code=int(error.exit_code))
    except OSError as error:
        told = unopened(hold.directory, error)
        voice.say(refused=str(told), code=int(told.exit_code))
    else:
        voice.say(stock=stock.to_json().decode())


def _end_with(line: int) -> None:
    """Leave the claim to whoever comes next where the main thread does not come to give it up."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    while not any(what & gone for _, what in poll.poll()):
        continue
    SYSTEM.sleep(CLOSE_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
