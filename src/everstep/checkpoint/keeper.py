"""The keeper of a plain loop's checkpoints: one small process per host, without torch, that outlives the ranks.

It holds their snapshots (shelf.py), decides what is written and has it written (ondemand.py, writer.py), and answers
what a restore begins from. Ranks come over a socket; each is also watched by the kernel.

    rank ─▶ ckpt.hello {rank, pid}                  ─▶ ckpt.welcome {…} when all have come, or ckpt.refused {text, code}
    rank ─▶ ckpt.restore {ask, step}                ─▶ ckpt.plan {ask, …} when all ask
    rank ─▶ ckpt.checked {ask, fits, text}          ─▶ ckpt.go {ask}, another ckpt.plan, or
                                                        ckpt.misfit, ckpt.unreachable {ask, text}
    rank ─▶ ckpt.close                              ─▶ ckpt.closed {problems} when all have closed and all is written

A plan that is read from a directory comes with a line to a process that reads it (reading_beside.py). Of several hosts
that of rank 0 has the one keeper that decides, for all ranks; deputy.py stands for it on the others (keeper_far.py).

Rule 1: it ends when its ranks have ended, closed or not, and what was begun is written: at the latest FINISH_S later,
    and where the storage has taken nothing for the grace time as soon as that has passed.
Rule 2: what the ranks left in memory and is newer than what is durable is written before it ends.
Rule 3: a rank that is gone ends no write.
Rule 4: it makes no call to a directory itself: such a call may never return.
Rule 5: a host that is gone is its ranks gone, with all that they left in memory.

usage: python -m everstep.checkpoint.keeper LINK_FD [LISTENING_FD [FAR_FD]] (then packets: ckpt.begin)
"""

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.asked_shelf import AskedShelf
from everstep.checkpoint.core.hosts import Hosts
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.keeper_claims import Claims, KeeperHold
from everstep.checkpoint.keeper_far import Far, FarLine
from everstep.checkpoint.keeper_hands import Hands, Speaker
from everstep.checkpoint.keeper_host import KeeperHost
from everstep.checkpoint.keeper_ledger import KeeperLedger
from everstep.checkpoint.keeper_ranks import Ranks
from everstep.checkpoint.ondemand import OnDemand
from everstep.checkpoint.ondemand_far import FarOnDemand
from everstep.checkpoint.restoring import Restoring
from everstep.checkpoint.shares import Share, shares
from everstep.clock import SYSTEM
from everstep.errors import EverstepError, ExitCode
from everstep.process import kernel
from everstep.process.detach import detach
from everstep.process.loop import Loop
from everstep.recovery.link import Link
from everstep.telemetry import say

MEET_S = 300.0
FINISH_S = 600.0
PATROL_S = 2.0


class Keeper:
    """From its first rank to the end of the last. `far`: where keepers of other hosts come."""

    def __init__(
        self,
        loop: Loop,
        first: Link,
        door: socket.socket | None,
        far: socket.socket | None = None,
        hands: Callable[[Loop, Mapping[str, str]], Hands] = Hands,
    ) -> None:
        self._loop, self._far_door, self._hands = loop, far, hands
        self._closing: dict[int, int] = {}  # rank → its question
        self._gone: dict[int, str] = {}
        self._host: KeeperHost | None = None
        self._claims: Claims | None = None  # as soon as all ranks have come
        self._far: Far | None = None
        self._finishing = self._welcomed = self._left = self._told_ending = False
        self._settings: Mapping[str, Any] = {}
        self._ranks = Ranks(loop, first, door, self)
        loop.later(MEET_S, self._too_late)

    # -- ranks come ----------------------------------------------------------------------------------------------

    def begin(self, settings: Mapping[str, Any]) -> None:
        """See `Keeping.begin`."""
        self._settings = settings
        if self._far_door is not None:
            hosts = Hosts.from_json(settings["hosts"])
            self._far = Far(self._loop, hosts, str(settings["token"]), self._far_door, self)
        shelf = AskedShelf(far=self._far, readers=len(settings["tiers"]))
        self._holds = [KeeperHold(tier["directory"]) for tier in settings["tiers"]]
        tiers = [
            self._tier(hold, share, tier)
            for tier, hold, share in zip(
                settings["tiers"], self._holds, shares(shelf, len(settings["tiers"])), strict=True
            )
        ]
        shelf.older = lambda: [
            one for tier in tiers for one in tier.committed() if shelf.only is None or one.step == shelf.only
        ]
        ledger = KeeperLedger(settings, self._loop.clock)
        hands = self._hands(self._loop, settings["training"])
        self._host = KeeperHost(self._loop, settings, shelf, tiers, ledger, hands, self._far)
        self._restoring = Restoring(self._host)

    def _tier(self, hold: KeeperHold, share: Share, tier: Mapping[str, Any]) -> OnDemand:
        words = hold.directory, share, Keep(**tier["keep"]), tier["tier"]
        skip, grace_s = self._settings["on_busy"] == "skip", float(self._settings["grace"])
        if self._far is None:
            return OnDemand(*words, skip=skip, hold=hold, grace_s=grace_s)
        return FarOnDemand(*words, skip=skip, hold=hold, grace_s=grace_s, far=self._far)

    def hello(self, rank: int, pid: int, line: Speaker) -> bool:
        """See `Keeping.hello`."""
        del pid
        if self._host is None or rank in self._host.lines:
            return False
        self._host.lines[rank] = line
        if len(self._host.lines) == self._host.world_size:
            self._loop.later(0.0, self._open)
        return True

    def deserted(self) -> None:
        """See `Keeping.deserted`."""
        self._leave()

    def _open(self) -> None:
        """All have come: have the directories, and say so."""
        host = self._host
        assert host is not None
        self._ranks.shut()
        if self._left:
            return
        self._claims = Claims(self._loop, host.spawn, self._holds, float(self._settings["grace"]), host.tell)
        who = f"a Checkpointer of process {self._settings['pid']}"
        self._claims.take(who, FINISH_S, self._had, self._refuse)

    def _refuse(self, text: str, code: int) -> None:
        assert self._host is not None
        if not self._left:
            self._host.tell({"kind": "ckpt.refused", "text": text, "code": code})
            self._leave()

    def _had(self) -> None:
        """The directories are ours; all hosts must see them."""
        if self._left:
            return
        if self._far is None:
            self._serve()
            return
        self._far.look([(hold.directory, hold.job) for hold in self._holds], self._serve)

    def _serve(self) -> None:
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
            newest = {tier.prefix: tier.inventory.highest for tier in host.tiers}
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

    def said(self, rank: int, message: dict[str, Any]) -> None:
        """See `Keeping.said`."""
        assert self._host is not None
        match str(message["kind"]):
            case "ckpt.close":
                self._closing[rank] = int(message["ask"])
                self._away(rank, "has closed its Checkpointer")
            case "ckpt.restore":
                self._restoring.asked(rank, message)
            case "ckpt.checked":
                self._restoring.checked(rank, message)
            case kind:
                self._host.said(rank, kind, message)

    # -- of other hosts ------------------------------------------------------------------------------------------

    def far_came(self, rank: int, line: FarLine) -> None:
        """See `Leading.far_came`."""
        self.hello(rank, 0, line)

    def far_said(self, rank: int, message: Mapping[str, Any]) -> None:
        """See `Leading.far_said`."""
        if not self._left:
            self.said(rank, dict(message))

    def far_sealed(self, rank: int, rows: Sequence[Sequence[int]]) -> None:
        """See `Leading.far_sealed`."""
        if self._host is not None:
            self._host.shelf.far_sealed(rank, rows)

    def far_away(self, rank: int, why: str) -> None:
        """See `Leading.far_away`."""
        self.went(rank, why)

    def far_lost(self, host: int, why: str) -> None:
        """See `Leading.far_lost`."""
        if self._left or self._host is None or self._far is None:
            return
        hosts = self._far.hosts
        ranks, name = hosts.ranks(host), hosts.names[host]
        self._host.shelf.forget(ranks)
        if self._welcomed:
            say(f"the keeper of {hosts.told(host)} is lost: {why}; nothing more can be saved of this world")
            for tier in self._host.tiers:
                assert isinstance(tier, FarOnDemand)
                tier.lost(ranks, f"host {name} is lost: {why}")
        for rank in ranks:
            self._away(rank, f"was on host {name}, which is lost: {why}")

    def far_missing(self, text: str) -> None:
        """See `Leading.far_missing`."""
        self._refuse(text, int(ExitCode.CONFIGURATION))

    # -- ranks go ------------------------------------------------------------------------------------------------

    def went(self, rank: int, why: str) -> None:
        """See `Keeping.went`."""
        if not self._left:  # else it is being closed
            self._away(rank, why)

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
        if host is None or not self._welcomed:
            return
        self._tell_that_it_ends()
        if len(self._gone) < host.world_size:
            return
        if not self._finishing:
            self._finishing = True
            host.rechecked = self._look
            self._loop.later(FINISH_S, self._leave)
        if host.drained():
            self._leave()

    def _tell_that_it_ends(self) -> None:
        """Where the ranks of our host are gone, so is the world: another host may be lost, and not known to be yet."""
        if self._told_ending or not self._gone.keys() >= self._ranks.lines.keys():
            return
        self._told_ending = True
        if self._claims is not None:
            self._claims.ending()

    def _patrol(self) -> None:
        if self._host is not None:
            self._host.patrol()
        self._loop.later(PATROL_S, self._patrol)

    def _leave(self) -> None:
        if self._left:
            return
        host, self._left, self._ranks.over = self._host, True, True
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
    doors = [socket.socket(fileno=int(word)) for word in argv[1:]]
    door, far = (*doors, None, None)[:2]
    keeper = Keeper(Loop(SYSTEM), Link.from_fd(int(argv[0])), door, far)
    keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
