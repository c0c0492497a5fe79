"""Every process of the job on this node: born of the zygote, owned, watched and reaped by the agent.

Rule 1: a process is known by incarnation from the instant it exists: its pidfd is open before it runs a line (Z3).
Rule 2: the agent alone reaps; adopted strays are reaped without a word.
Rule 3: with a process goes its session: what it left behind on this node is killed (LA-06).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep import environ
from everstep.errors import ConfigurationError, EverstepError
from everstep.events import ProcessEnded, ProcessStarted
from everstep.launcher.agent.line import Line
from everstep.launcher.agent.loop import Loop
from everstep.process import kernel
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import Link
from everstep.telemetry import Telemetry, boot_id

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Refused(EverstepError):
    """The zygote ended the job before it began: a wrong flag, or `--help` (then the text is empty)."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class Process:
    """One process of ours."""

    name: str
    line: Line
    on_message: Callable[["Process", dict[str, Any], list[int]], None]
    on_exit: Callable[["Process", int], None]
    pid: int = 0
    incarnation: Incarnation | None = None
    pidfd: int = -1
    expected_end: bool = False
    killed: bool = False
    slot: int | None = None
    rank: int | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    _early: list[tuple[Mapping[str, Any], list[int]]] = field(default_factory=list[tuple[Mapping[str, Any], list[int]]])

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """See `recovery.api.Child.send`. What is said before the process runs comes to it after our `go`."""
        if self.incarnation is None:
            self._early.append((message, [os.dup(fd) for fd in fds]))
        else:
            self.line.send(message, fds)

    def go(self, incarnation: Incarnation) -> None:
        """We know who it is and hold its pidfd: it may run."""
        self.incarnation = incarnation
        self.send({"kind": "go", "incarnation": str(incarnation)})
        while self._early:
            message, fds = self._early.pop(0)
            self.send(message, fds)
            for fd in fds:
                os.close(fd)

    def kill(self) -> None:
        """SIGKILL; the end comes to `on_exit`."""
        self.killed = True
        if self.pid:
            kernel.kill(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.pid:
            kernel.kill(self.pid, number)


class Nursery:
    """Starts, knows and buries processes."""

    def __init__(self, loop: Loop, telemetry: Telemetry, job: str) -> None:
        self._loop, self._telemetry, self._job = loop, telemetry, job
        self.run_dir = ""
        self.early: list[ProcessStarted] = []  # before the ledger has a folder
        self._orders: dict[int, Process] = {}
        self._early_deaths: dict[int, int] = {}
        self._number = 0
        self.processes: dict[int, Process] = {}
        self.environment: dict[str, str] = {}
        self._zygote: subprocess.Popen[bytes] | None = None
        self._zygote_line: Line | None = None
        self._zygote_said: list[dict[str, Any]] = []
        self.zygote_lost: Callable[[], None] = lambda: None

    def start_zygote(self) -> None:
        """Exec the zygote, before any other descriptor of ours is open (Z4)."""
        kernel.adopt_orphans()
        self.environment = environ.snapshot() | {"EVERSTEP_JOB": self._job}
        # torch asks for the name of every address that a store's client connects to: a lost packet must not cost 5 s.
        self.environment.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
        self.environment.setdefault("PYTHONHASHSEED", str(int.from_bytes(os.urandom(4), "little")))  # Z5: one a job
        own = dict.fromkeys(THREAD_VARIABLES, "1") | {
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() makes no CUDA context
            "TORCH_CPP_LOG_LEVEL": self.environment.get("TORCH_CPP_LOG_LEVEL", "error"),
        }
        link, theirs = Link.pair()
        command = [sys.executable, "-m", "everstep.launcher.zygote", str(theirs.fileno()), self._job]
        self._zygote = subprocess.Popen(
            command, env=self.environment | own, pass_fds=[theirs.fileno()], process_group=0, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._zygote_line = Line(self._loop, link, self._heard)
        identity = str(_identity(self._zygote.pid))
        self.early.append(ProcessStarted(name="zygote", child_pid=self._zygote.pid, incarnation=identity))

    def ask_zygote(self, message: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Send, and serve until the zygote says `answer`. Raises Refused, or ConfigurationError when it dies."""
        assert self._zygote_line is not None
        assert self._zygote is not None
        self._zygote_line.send(message)
        while True:
            for said in self._zygote_said:
                if said["kind"] == "zygote.refused":
                    raise Refused(said["text"], said["code"])
                if said["kind"] == answer:
                    self._zygote_said.remove(said)
                    return said
            if self._zygote.returncode is not None:
                raise ConfigurationError(
                    f"the zygote ended with status {self._zygote.returncode} before the job began; "
                    "what it printed stands above."
                )
            self._loop.later(0.5, self.reap)
            self._loop.turn()

    def _heard(self, message: dict[str, Any], fds: list[int]) -> None:
        del fds
        if message["kind"] == "zygote.forked":
            self._born(self._orders.pop(message["order"]), message["pid"])
        else:
            self._zygote_said.append(message)

    def notices(self) -> list[str]:
        """What the zygote had to say about modules, once."""
        texts = [said["text"] for said in self._zygote_said if said["kind"] == "zygote.notice"]
        self._zygote_said = [said for said in self._zygote_said if said["kind"] != "zygote.notice"]
        return texts

    def order(
        self,
        name: str,
        order: Mapping[str, Any],
        on_message: Callable[[Process, dict[str, Any], list[int]], None],
        on_exit: Callable[[Process, int], None],
        fds: Sequence[int] = (),
        slot: int | None = None,
    ) -> Process:
        """Order a child of the zygote; it runs its first line once we hold its pidfd."""
        assert self._zygote_line is not None
        link, theirs = Link.pair()
        process: Process

        def heard(message: dict[str, Any], got: list[int]) -> None:
            process.on_message(process, message, got)

        process = Process(name, Line(self._loop, link, heard), on_message, on_exit, slot=slot)
        number, self._number = self._number, self._number + 1
        base = {
            "kind": "zygote.fork",
            "order": number,
            "agent": os.getpid(),
            "job": self._job,
            "run_dir": self.run_dir,
        }
        self._orders[number] = process
        self._zygote_line.send(
            base | {"name": name, "environment": self.environment} | dict(order), [theirs.fileno(), *fds]
        )
        theirs.close()
        return process

    @property
    def unborn(self) -> int:
        """Processes that were ordered and are not known yet."""
        return len(self._orders)

    def _born(self, process: Process, pid: int) -> None:
        process.pid = pid
        identity = _identity(pid)
        self.processes[pid] = process
        self._telemetry.emit(
            ProcessStarted(name=process.name, child_pid=pid, incarnation=str(identity), child_slot=process.slot)
        )
        early = self._early_deaths.pop(pid, None)
        if early is not None:  # it was gone, and reaped, before we heard of it
            process.incarnation = identity
            self._bury(self.processes.pop(pid), early)
            return
        process.pidfd = os.pidfd_open(pid)  # ours to reap, so it exists at least as a zombie
        self._loop.watch(process.pidfd, self.reap)
        process.go(identity)
        if process.killed:
            process.kill()

    def reap(self) -> None:
        """Bury whoever has died."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._zygote is not None and pid == self._zygote.pid:
                self._zygote.returncode = code
                self.zygote_lost()
            process = self.processes.pop(pid, None)
            if process is not None:
                self._bury(process, code)
            elif self._orders:
                self._early_deaths[pid] = code

    def _bury(self, process: Process, code: int) -> None:
        if process.pidfd >= 0:
            self._loop.unwatch(process.pidfd)
            os.close(process.pidfd)
        kernel.kill_session(process.pid)
        process.line.close()  # reads what it still said
        if self._zygote_line is not None:
            self._zygote_line.send({"kind": "zygote.forget", "pid": process.pid})
        self._telemetry.emit(
            ProcessEnded(
                name=process.name, child_pid=process.pid, status=code, expected=process.expected_end,
                child_slot=process.slot, child_rank=process.rank,
            )
        )  # fmt: skip
        process.on_exit(process, code)

    def strays(self) -> list[int]:
        """Adopted processes: children of ours that we did not order."""
        known = set(self.processes) | ({self._zygote.pid} if self._zygote is not None else set())
        mine = os.getpid()
        return [p for p, s in kernel.processes().items() if s.parent == mine and p not in known and s.state != "Z"]

    def close(self) -> None:
        """End the zygote and every stray; nothing of the job is left on this node."""
        if self._zygote is not None and self._zygote.returncode is None:
            self._zygote.send_signal(signal.SIGKILL)
            self._zygote.wait()
        if self._zygote_line is not None:
            self._zygote_line.close()
        for _ in range(100):  # a stray that is killed may leave children of its own to us; one in D state stays
            for pid in self.strays():
                kernel.kill(pid)
            self.reap()
            if not self.strays():
                return
            self._loop.clock.sleep(0.01)


def _identity(pid: int) -> Incarnation:
    stat = kernel.status(pid)
    return Incarnation(boot_id(), pid, stat.start if stat is not None else 0)
