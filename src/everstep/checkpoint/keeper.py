"""The keeper of a plain loop's checkpoints: one small process per host, without torch, that outlives the ranks.

It holds their snapshots (shelf.py), decides what is written and has it written (ondemand.py, writer.py), and answers
what a restore begins from. Ranks come over a socket; each is also watched by the kernel.

    rank ─▶ ckpt.hello {rank, pid}                  ─▶ ckpt.welcome {…} when all have come, or ckpt.refused {text, code}
    rank ─▶ ckpt.restore {ask, step}                ─▶ ckpt.plan {ask, …} when all ask
    rank ─▶ ckpt.checked {ask, fits, text}          ─▶ ckpt.go {ask}, another ckpt.plan, or ckpt.misfit {ask, text}
    rank ─▶ ckpt.close                              ─▶ ckpt.closed {problems} when all have closed and all is written

A plan that is read from a directory comes with a line to a process that reads it (reading_beside.py).

Rule 1: it ends when its ranks have ended, closed or not, and what was begun is written: at the latest FINISH_S later,
    and where the storage has taken nothing for the grace time as soon as that has passed.
Rule 2: what the ranks left in memory and is newer than what is durable is written before it ends.
Rule 3: a rank that is gone ends no write.
Rule 4: it makes no call to a directory itself: such a call may never return.

usage: python -m everstep.checkpoint.keeper LINK_FD [LISTENING_FD] (then packets: ckpt.begin)
"""

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.checkpoint.asked_shelf import AskedShelf
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.keeper_claims import Claims, KeeperHold
from everstep.checkpoint.keeper_host import KeeperHost
from everstep.checkpoint.keeper_ledger import KeeperLedger
from everstep.checkpoint.ondemand import OnDemand
from everstep.checkpoint.restoring import Restoring
from everstep.checkpoint.shares import shares
from everstep.clock import SYSTEM
from everstep.errors import EverstepError, ExitCode
from everstep.process import kernel
from everstep.process.detach import detach
from everstep.process.loop import Loop
from everstep.recovery.line import Line
from everstep.recovery.link import Link
from everstep.telemetry import say

MEET_S = 300.0
FINISH_S = 600.0
PATROL_S = 2.0
_PEER = struct.Struct("3i")


class Keeper:
    """From its first rank to the end of the last."""

    def __init__(self, loop: Loop, first: Link, door: socket.socket | None) -> None:
        self._loop, self._door = loop, door
        self._unnamed: list[Line] = []
        self._pidfds: dict[int, int] = {}
        self._closing: dict[int, int] = {}  # rank → its question
        self._gone: dict[int, str] = {}
        self._host: KeeperHost | None = None
        self._claims: Claims | None = None  # as soon as all ranks have come
        self._finishing = self._welcomed = self._left = False
        self._settings: Mapping[str, Any] = {}
        self._first = self._enter(first)
        if door is not None:
            loop.watch(door.fileno(), self._accept)
        loop.later(MEET_S, self._too_late)

    # -- ranks come ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._door is not None
        end, _ = self._door.accept()
        _, uid, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.getuid():
            end.close()
            return
        self._enter(Link(end))

    def _enter(self, link: Link) -> Line:
        line: list[Line] = []

        def heard(message: dict[str, Any], fds: list[int]) -> None:
            self._heard(line[0], message, fds)

        def ended() -> None:
            self._ended(line[0])

        line.append(Line(self._loop, link, heard, ended))
        self._unnamed.append(line[0])
        return line[0]

    def _heard(self, line: Line, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        kind = str(message["kind"])
        if kind == "ckpt.begin":
            self._begin(message)
        elif kind == "ckpt.hello":
            self._hello(line, message)
        elif self._host is not None and (rank := self._host.rank_of(line)) is not None:
            self._said(rank, kind, message)

    def _begin(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        shelf = AskedShelf(readers=len(settings["tiers"]))
        skip, grace_s = settings["on_busy"] == "skip", float(settings["grace"])
        self._holds = [KeeperHold(tier["directory"]) for tier in settings["tiers"]]
        tiers = [
            OnDemand(hold.directory, share, Keep(**tier["keep"]), tier["tier"], skip=skip, hold=hold, grace_s=grace_s)
            for tier, hold, share in zip(
                settings["tiers"], self._holds, shares(shelf, len(settings["tiers"])), strict=True
            )
        ]
        shelf.older = lambda: [
            one for tier in tiers for one in tier.committed() if shelf.only is None or one.step == shelf.only
        ]
        self._host = KeeperHost(self._loop, settings, shelf, tiers, KeeperLedger(settings, self._loop.clock))
        self._restoring = Restoring(self._host)

    def _hello(self, line: Line, message: Mapping[str, Any]) -> None:
        rank, pid = int(message["rank"]), int(message["pid"])
        if self._host is None or rank in self._host.lines:
            line.close()
            return
        self._unnamed.remove(line)
        self._host.lines[rank] = line
        with contextlib.suppress(ProcessLookupError):
            self._pidfds[rank] = os.pidfd_open(pid)
            self._loop.watch(self._pidfds[rank], lambda: self._lost(rank, pid))
        if len(self._host.lines) == self._host.world_size:
            self._open()

    def _open(self) -> None:
        """All have come: have the directories, and say so."""
        host = self._host
        assert host is not None
        if self._door is not None:
            self._loop.unwatch(self._door.fileno())
            self._door.close()
            self._door = None
        self._claims = Claims(self._loop, host.spawn, self._holds, float(self._settings["grace"]), host.tell)
        who = f"a Checkpointer of process {self._settings['pid']}"
        self._claims.take(who, FINISH_S, self._had, self._refuse)

    def _refuse(self, text: str, code: int) -> None:
        assert self._host is not None
        if not self._left:
            self._host.tell({"kind": "ckpt.refused", "text": text, "code": code})
            self._leave()

    def _had(self) -> None:
        """The directories are ours: begin."""
        host = self._host
        assert host is not None
        if self._left:
            return
        try:
            host.start()
        except EverstepError as error:
            self._refuse(str(error), int(error.exit_code))
            return
        self._welcomed = True
        for rank, told in host.enter().items():
            newest = {tier.prefix: tier.inventory.newest for tier in host.tiers}
            host.send(rank, {"kind": "ckpt.welcome", "pid": os.getpid(), "told": told, "newest": newest})
        self._loop.later(PATROL_S, self._patrol)
        self._look()

    def _too_late(self) -> None:
        if self._welcomed or self._claims is not None:
            return
        host = self._host
        if host is not None:
            missing = sorted(set(range(host.world_size)) - set(host.lines))
            text = f"ranks {missing} have not made their Checkpointer within {MEET_S:.0f} s: make it on every rank"
            host.tell({"kind": "ckpt.refused", "text": text, "code": int(ExitCode.CONFIGURATION)})
        self._leave()

    # -- ranks speak ---------------------------------------------------------------------------------------------

    def _said(self, rank: int, kind: str, message: dict[str, Any]) -> None:
        assert self._host is not None
        match kind:
            case "ckpt.close":
                self._closing[rank] = int(message["ask"])
                self._away(rank, "has closed its Checkpointer")
            case "ckpt.restore":
                self._restoring.asked(rank, message)
            case "ckpt.checked":
                self._restoring.checked(rank, message)
            case _:
                self._host.said(rank, kind, message)

    # -- ranks go ------------------------------------------------------------------------------------------------

    def _ended(self, line: Line) -> None:
        """The other side of a line has hung up."""
        if self._left:  # it is being closed
            return
        host = self._host
        rank = None if host is None else host.rank_of(line)
        line.close()
        if rank is not None:
            self._away(rank, "has ended")
        elif line in self._unnamed:
            self._unnamed.remove(line)
            if line is self._first:
                self._leave()

    def _lost(self, rank: int, pid: int) -> None:
        """The kernel says that a rank's process has ended."""
        assert self._host is not None
        self._loop.unwatch(self._pidfds[rank])
        self._host.lines[rank].close()  # what it still said comes first
        self._away(rank, f"(process {pid}) has ended")

    def _away(self, rank: int, why: str) -> None:
        host = self._host
        assert host is not None
        if rank in self._gone:
            return
        self._gone[rank] = why
        if not self._welcomed:
            host.tell({"kind": "ckpt.refused", "text": f"rank {rank} {why}", "code": int(ExitCode.FAILED)})
            self._leave()
            return
        self._restoring.away(rank, why)
        for tier in host.tiers:
            tier.away(rank, why)
        self._look()

    def _look(self) -> None:
        """Where all ranks are gone: finish, then end."""
        host = self._host
        if host is None or not self._welcomed or len(self._gone) < host.world_size:
            return
        if not self._finishing:
            self._finishing = True
            if self._claims is not None:
                self._claims.ending()
            host.rechecked = self._look
            self._loop.later(FINISH_S, self._leave)
        if host.drained():
            self._leave()

    def _patrol(self) -> None:
        if self._host is not None:
            self._host.patrol()
        self._loop.later(PATROL_S, self._patrol)

    def _leave(self) -> None:
        if self._left:
            return
        host, self._left = self._host, True
        if host is not None:
            problems = host.problems()
            if self._claims is not None and self._claims.problem:
                problems.append(self._claims.problem)
            for rank, ask in self._closing.items():
                host.send(rank, {"kind": "ckpt.closed", "ask": ask, "problems": problems})
            if problems and len(self._closing) < host.world_size and self._welcomed:
                say("; ".join(problems))
            host.close()
            host.ledger.close(problems)
        self._loop.stop()

    def run(self) -> None:
        """Serve until there is nobody to be served."""
        self._loop.run()


def main(argv: Sequence[str]) -> int:
    """Keep the checkpoints of one host's ranks."""
    detach()
    kernel.name_process("everstep-keeper")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    door = socket.socket(fileno=int(argv[1])) if len(argv) > 1 else None
    keeper = Keeper(Loop(SYSTEM), Link.from_fd(int(argv[0])), door)
    keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
