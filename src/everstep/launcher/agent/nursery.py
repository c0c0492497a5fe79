"""Every process of the job on this node: born of a zygote, owned, watched and reaped by the agent.

Rule 1: a process is known by incarnation from the instant it exists: its pidfd is open before it runs a line (Z3).
Rule 2: the agent alone reaps; adopted strays are reaped without a word.
Rule 3: with a process go its session and all that carries its mark: what it left behind on this node is killed (LA-06).
Rule 4: helpers, spares and the zygote are never stopped for good: one that stays so is killed, and so replaced.
Rule 5: an order stands until its child is there: a zygote that dies over it, or cannot fork, is asked again. Where no
        child can come any more, each order ends as a process that could not run (`UNBORN`), and `barren` says why.
"""

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep import environ
from everstep.events import Notice, ProcessEnded, ProcessStarted
from everstep.launcher.agent.frozen import HELPER_LOOKS, Stopped, Undying
from everstep.launcher.agent.process import OnExit, OnMessage, Process
from everstep.launcher.agent.zygotes import Zygotes
from everstep.process import kernel, mark
from everstep.process.loop import Loop
from everstep.recovery.core.words import Incarnation
from everstep.recovery.line import Line
from everstep.recovery.link import Link
from everstep.telemetry import Telemetry, boot_id

UNBORN = 71
"""The status of a process that never was (EX_OSERR)."""
RETRY_S = 1.0
MOST_RETRIES = 30
CLOSE_S = 2.0
DAEMON_PASSES = 5


@dataclass(eq=False)
class _Order:
    process: Process
    message: Mapping[str, Any]
    fds: list[int]
    tries: int = 0

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Nursery:
    """Starts, knows and buries processes; `zygotes.Family` of the zygote."""

    def __init__(self, loop: Loop, telemetry: Telemetry, job: str) -> None:
        self._loop, self._telemetry, self.job = loop, telemetry, job
        self.run_dir = ""
        self.early: list[ProcessStarted] = []  # before the ledger has a folder
        self.notices: list[str] = []  # likewise
        self._orders: dict[int, _Order] = {}
        self._early_deaths: dict[int, int] = {}
        self._number = 0
        self._closing = False
        self.processes: dict[int, Process] = {}
        self.environment: dict[str, str] = {}
        self.zygotes = Zygotes(loop, self, self.reap, os.getpid())
        self._stopped, self._undying = Stopped(HELPER_LOOKS), Undying()
        self.barren_for = ""
        self.home = boot_id()  # where the processes that are born here live
        self.spared: set[int] = set()  # children of ours that are to outlive us
        self.on_barren: Callable[[str], None] = lambda _: None

    def start_zygote(self) -> None:
        """Exec the zygote, before any other descriptor of ours is open (Z4)."""
        kernel.adopt_orphans()
        self.zygotes.files = kernel.raise_files_limit()  # a line, a page and snapshots for each process
        self.environment = environ.snapshot() | mark.words(self.job)
        # torch asks for the name of every address that a store's client connects to: a lost packet must not cost 5 s.
        self.environment.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
        self.environment.setdefault(
            "TORCH_CPP_LOG_LEVEL", "error"
        )  # else each lost peer is told of by every rank's C++
        self.environment.setdefault("PYTHONHASHSEED", str(int.from_bytes(os.urandom(4), "little")))  # Z5: one a job
        self.zygotes.start()

    def order(
        self,
        name: str,
        order: Mapping[str, Any],
        on_message: OnMessage,
        on_exit: OnExit,
        fds: Sequence[int] = (),
        slot: int | None = None,
    ) -> Process:
        """Order a child of the zygote; it runs its first line once we hold its pidfd."""
        self._number += 1
        process = Process(name, self._number, on_message, on_exit, slot=slot)
        if self._closing:
            return process
        base = {"kind": "zygote.fork", "order": self._number, "agent": os.getpid(), "job": self.job, "name": name}
        place = {"run_dir": self.run_dir, "environment": self.environment}
        self._orders[self._number] = _Order(process, base | place | dict(order), [os.dup(fd) for fd in fds])
        if self.barren_for:
            self._loop.later(0.0, self._give_up)
        elif self.zygotes.taking_orders:
            self._send(self._orders[self._number])
        return process

    def _send(self, order: _Order) -> None:
        process = order.process
        process.hang_up()  # a child that nobody told us of has the other end, and ends by it
        link, theirs = Link.pair()

        def heard(message: dict[str, Any], got: list[int]) -> None:
            process.on_message(process, message, got)

        process.line = Line(self._loop, link, heard)
        self.zygotes.order(order.message, [theirs.fileno(), *order.fds])
        theirs.close()

    # -- what zygotes say ----------------------------------------------------------------------------------------

    def started(self, pid: int) -> None:
        """See `Family.started`."""
        event = ProcessStarted(name="zygote", child_pid=pid, incarnation=str(self._identity(pid)))
        if self.run_dir:
            self._telemetry.emit(event)
        else:
            self.early.append(event)

    def ready(self) -> None:
        """See `Family.ready`."""
        for order in list(self._orders.values()):
            self._send(order)

    def forked(self, number: int, pid: int) -> None:
        """See `Family.forked`."""
        order = self._orders.pop(number, None)
        if order is None:  # it was called back meanwhile
            kernel.kill(pid)
            return
        order.close()
        self._born(order.process, pid)

    def unborn(self, number: int, why: str) -> None:
        """See `Family.unborn`."""
        order = self._orders.get(number)
        if order is None:
            return
        order.tries += 1
        if order.tries > MOST_RETRIES:
            self.barren(f"{order.tries} tries to fork {order.process.name} have failed: {why}")
            return
        if order.tries == 1:
            self.notice(f"{order.process.name} cannot be forked: {why}; it is tried again for {MOST_RETRIES} s")
        self._loop.later(RETRY_S, lambda: self._again(number))

    def _again(self, number: int) -> None:
        order = self._orders.get(number)
        if order is not None and self.zygotes.taking_orders:
            self._send(order)

    def orphaned(self, status: int) -> Sequence[int]:
        """See `Family.orphaned`."""
        end = f"signal {-status}" if status < 0 else f"status {status}"
        waiting = f"; {len(self._orders)} processes wait for it" if self._orders else ""
        if not self._closing:
            self.notice(f"the zygote ended by {end}: a new one is prepared, training goes on{waiting}")
        return [*self.processes]

    def barren(self, why: str) -> None:
        """See `Family.barren`."""
        if self.barren_for or self._closing:
            return
        self.barren_for = why
        self.on_barren(why)
        self._give_up()

    def _give_up(self) -> None:
        for number in list(self._orders):
            order = self._orders.pop(number, None)
            if order is None:  # what an earlier one's end set off has come here too
                continue
            order.close()
            order.process.forget()
            order.process.on_exit(order.process, UNBORN)

    def notice(self, text: str) -> None:
        """See `Family.notice`."""
        if self.run_dir:
            self._telemetry.emit(Notice(text=text, level="warning"))
        else:
            self.notices.append(text)

    # -- births and deaths ---------------------------------------------------------------------------------------

    def _born(self, process: Process, pid: int) -> None:
        process.pid = pid
        identity = self._identity(pid)
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
                break
            code = os.waitstatus_to_exitcode(status)
            process = self.processes.pop(pid, None)
            if process is not None:
                self._bury(process, code)
            elif not self.zygotes.gone(pid, code):
                self._early_deaths[pid] = code
        if not self._orders:
            self._early_deaths.clear()

    def _bury(self, process: Process, code: int) -> None:
        process.gone = True
        if process.pidfd >= 0:
            self._loop.unwatch(process.pidfd)
            os.close(process.pidfd)
        mark.kill(self.job, process.number, frozenset({process.pid}))
        process.hang_up()
        self.zygotes.forget(process.pid)
        self._telemetry.emit(
            ProcessEnded(
                name=process.name, child_pid=process.pid, status=code, expected=process.expected_end,
                child_slot=process.slot, child_rank=process.rank,
            )
        )  # fmt: skip
        process.on_exit(process, code)

    def patrol(self, watched: Container[int]) -> None:
        """Kill what is stopped and not watched by others: a dead helper is replaced, a stopped one waited for."""
        for pid in self._stopped.look(pid for pid in (self.zygotes.pid, *self.processes) if pid not in watched):
            kernel.kill(pid)

    def look_for_undying(self, now: float) -> None:
        """Tell, once each, of processes that SIGKILL does not end: they wait in the kernel, on storage or a driver."""
        killed = [pid for pid, process in self.processes.items() if process.killed]
        for pid in self._undying.look(killed, now):
            self.notice(f"{self._dying(pid)}, {self._undying.limit_s:g} s after SIGKILL")

    @property
    def undying(self) -> Sequence[str]:
        """Those that were told of and are still there, with where they wait."""
        return [self._dying(pid) for pid in self._undying.told if pid in self.processes]

    def _dying(self, pid: int) -> str:
        return f"{self.processes[pid].name} (pid {pid}) does not die: {kernel.place(pid)}"

    def _identity(self, pid: int) -> Incarnation:
        stat = kernel.status(pid)
        return Incarnation(self.home, pid, stat.start if stat is not None else 0)

    # -- the end -------------------------------------------------------------------------------------------------

    def recall(self) -> None:
        """Nobody else is to be born: orders that wait are void, without a word to whoever gave them."""
        self._closing = self.zygotes.last = True
        for order in self._orders.values():
            order.close()
            order.process.forget()
        self._orders.clear()

    def strays(self) -> list[int]:
        """Adopted processes: children of ours that we did not order."""
        known = {self.zygotes.pid, *self.processes, *self.spared}
        found = [pid for pid in kernel.children() if pid not in known]
        states = [(pid, kernel.status(pid)) for pid in found]
        return [pid for pid, stat in states if stat is not None and stat.state != "Z"]

    def strays_of(self, process: Process) -> list[int]:
        """Daemons that a living process of ours, or a child of it, has let go of."""
        own = mark.text(process.number)
        return [pid for pid in self.strays() if mark.of(pid).get(mark.BORN) == own]

    def end_daemons(self, spared: Mapping[int, Container[int]]) -> None:
        """End the daemons, and their sessions, of living processes by number, but for those that are spared.

        Looked for again while one is found: the kernel's list leaves some out while others of it end.
        """
        for _ in range(DAEMON_PASSES):
            found = [(pid, mark.of(pid).get(mark.BORN, "")) for pid in self.strays()]
            going = [pid for pid, born in found if born.isdigit() and pid not in spared.get(int(born), (pid,))]
            for pid in going:
                stat = kernel.status(pid)
                if stat is not None and stat.session not in self.processes:
                    kernel.kill_session(stat.session)
                kernel.kill(pid)
            if not going:
                return

    def close(self) -> list[int]:
        """End all that is left of the job on this node; return what cannot be ended (in D state)."""
        self.recall()
        self.zygotes.close()
        until = self._loop.clock.now() + CLOSE_S
        while True:
            for process in self.processes.values():
                process.expected_end = True
                process.kill()
            for pid in self.strays():  # one that is killed may leave children of its own to us
                kernel.kill(pid)
            mark.kill(self.job)
            self.reap()
            left = [*self.processes, *self.strays()]
            if (not left and not self.zygotes.pid) or self._loop.clock.now() > until:
                return left
            self._loop.clock.sleep(0.005)
