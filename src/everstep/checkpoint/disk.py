"""The disk tier as it rides on the agent: intents to the ranks, snapshots to the writers, commits, retention.

It decides nothing itself: which step (core/intents.py), how far a save is (core/commit.py), what goes
(core/retention.py). It carries messages between ranks, writers and those (disk_saves.py), and never touches the disk
while the job runs: a writer does. Two of them, of two directories, read the same snapshots at their own pace.

    rank ◀─ disk.intent {save, step}              rank ─▶ disk.staged {save, buffer, hold}  or  disk.late {save, step}
    rank ◀─ disk.void {save}, disk.problem {text}
    rank ─▶ disk.reader {ask}                     rank ◀─ disk.door {ask} + socket   (to a process that reads for it)
    rank ─▶ disk.damaged {step, text}             (a restore found it damaged: the next best is taken)
    rank ─▶ disk.restored {step, total}           (rank 0: the job goes on from it; said where an earlier job saved it)
    rank ─▶ disk.measured {step, metrics}         (rank 0, of a step that is saved: by them the best are kept)
"""

import os
from collections.abc import Mapping, Sequence

from everstep.checkpoint import catalog, reading_beside
from everstep.checkpoint.core import commit, intents, retention
from everstep.checkpoint.core.final import newest_common
from everstep.checkpoint.core.findings import Findings
from everstep.checkpoint.core.plan import Committed
from everstep.checkpoint.disk_saves import Saves
from everstep.checkpoint.holder import Hold, OwnHold
from everstep.checkpoint.patience import GRACE_S
from everstep.checkpoint.series import MAKE, strangers
from everstep.checkpoint.source import Source
from everstep.checkpoint.unreachable import NOW, unreachable
from everstep.checkpoint.writers import Writers
from everstep.errors import ConfigurationError
from everstep.events import TierEvent
from everstep.recovery.api import Child, Host, Message
from everstep.recovery.core.words import Roster
from everstep.recovery.link import Link

TIER = catalog.TIER


class Disk(Saves):
    """Companion of one directory, named for its tier. `keep`: what stays, a number: the newest so many, None: all.

    `behind`: another one, started before, whose directory holds what this one does, later. What goes wrong here is then
    a notice, never the exit status; a directory that cannot serve, or is of another training, is done without; and the
    last step is saved in the one behind alone.
    """

    def __init__(
        self,
        directory: str,
        interval: int,
        shelf: Source,
        keep: retention.Keep | int | None = retention.DEFAULT_KEEP,
        tier: str = TIER,
        *,
        hold: Hold | None = None,
        grace_s: float = GRACE_S,
        behind: "Disk | None" = None,
    ) -> None:
        super().__init__(tier, shelf, hold or OwnHold(directory), keep, grace_s, lesser=behind is not None)
        self._plan = intents.Plan(interval)
        self._given = directory
        self._running = False  # a generation is under way
        self._planned = False  # and from where it has begun is known
        self._final_tried = False
        self._last = ""  # the save of the last step, which no rank has to come to any more
        self._behind = behind
        self.before: Disk | None = None  # who has us behind it
        self.series: str | None = None  # of which training the checkpoints are, where that matters
        self.findings: Findings | None = None
        if behind is not None:
            behind.before, behind.series = self, MAKE

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host_given = host
        findings = self.findings = self._opened()
        if findings is not None:
            self.series = findings.series
            for text in findings.told:
                self._notice(text.removeprefix("warning: "), "warning" if text.startswith("warning: ") else "info")
            self._take_stock(findings)
        if self.before is None:
            self._check_that_one_is_whole()
        if findings is not None:
            self._begin_writers(host)

    def _begin_writers(self, host: Host) -> None:
        called = "" if self.tier == TIER else f"{self.tier}-"
        self._writers_begun = Writers(host, self.directory, self._hold.lock, self._patience.sign_s, called)
        self._writers.start()

    def _opened(self) -> Findings | None:
        """Have the directory; None where it cannot serve and is done without."""
        if self._behind is None:
            return self._hold.open(self._host.run_dir, self.series)
        try:
            findings = self._hold.open(self._host.run_dir, self._behind.series)
            if findings.series == self._behind.series:
                return findings
            refusal = strangers(self.directory, self._behind.directory)
        except ConfigurationError as error:
            refusal = str(error)
        else:
            self._check_that_this_is_no_loss(findings, refusal)
        self._hold.close()
        self._notice(f"nothing is read from or written to the {self.tier} tier: {refusal}", "warning")
        return None

    def _check_that_this_is_no_loss(self, other: Findings, refusal: str) -> None:
        """An empty shared directory beside steps of a training may be one that is not mounted: a person decides."""
        first = self._behind
        if first is not None and first.findings is not None and other.found and not first.findings.found:
            self._hold.close()
            raise ConfigurationError(f"there is nothing in {first.directory}, and {refusal}.")

    def committed(self) -> Sequence[Committed]:
        """Whole checkpoints of this directory, newest first, for the plan of a generation's beginning."""
        return self.inventory.committed()

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""
        _close(fds)
        self._said(rank, message["kind"].partition(".")[2], message)

    def _said(self, rank: int, verb: str, message: Message) -> None:
        match verb:
            case "staged":
                self._staged(rank, message["save"], message["buffer"], message["hold"])
            case "late":
                self._late(rank, message["save"], message["step"])
            case "reader":
                self._have_it_read(rank, int(message["ask"]))
            case "damaged":
                self._strike(message["step"], message["text"])
            case "restored":
                self._continue(message["step"], message["total"])
            case "measured":
                self.inventory.metrics[message["step"]] = message["metrics"]
            case _:
                return

    def _have_it_read(self, rank: int, ask: int) -> None:
        """Give a rank its line to a process that reads the directory: a read that never returns is not the rank's."""
        ours, theirs = Link.pair()
        child = self._host.spawn(f"reader-{rank}", reading_beside.HELPER, {})
        child.send({"kind": "serve"}, [theirs.fileno()])
        self._host.send(rank, {"kind": f"{self.prefix}.door", "ask": ask}, [ours.fileno()])
        ours.close()
        theirs.close()

    def _late(self, rank: int, token: str, step: int) -> None:
        """Of all ranks that say so about one intent, the first makes the lead grow."""
        learn = intents.late if self._is(token) else intents.saw
        self._plan = learn(self._plan, step)
        self._hear(token, commit.Late(rank, step))

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""
        rank = self._writers.rank_of(child)
        if rank is None:
            _close(fds)
            return
        token, kind = message.get("save"), message["kind"]
        self._patience.moved(self._host.clock.now())
        if kind == "written" and self._is(token):
            self._writers.keep_fragment(rank, fds)
            self._hear(token, commit.Written(rank, message["bytes"]))
            return
        _close(fds)
        if kind == "published":
            self._hear(token, commit.Published(), message["bytes"])
        elif kind == "refused" and token is None:
            self._writers.done(rank)
        elif kind == "refused":
            self._hear(token, commit.Refused(rank, message["text"]))
        elif kind in ("pruned", "discarded"):
            self._writers.done(rank)
            if message["text"]:
                self._notice(message["text"], "warning")
            self._host.recheck()

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        rank = self._writers.rank_of(child)
        if rank is None:
            return
        text = self._writers.lost(rank, status)
        self._notice(text, "warning")
        if self._save is not None:
            self._hear(self._save.token, commit.WriterLost(rank, text))
        if self._save is not None and self._writers.given_up:
            self._hear(self._save.token, commit.Stopped(text))
        if self._writers.given_up and text not in self._problems:
            self._problems.append(text)
        self._host.recheck()

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`. What is being written goes on: writers read what the agent holds."""
        self._running = False
        if self._save is not None:
            self._hear(self._save.token, commit.Stopped(f"generation {generation} ended first"))

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        self.on_stopped(self._lineage[1])
        self._lineage = (roster.epoch, roster.generation)
        self._running, self._final_tried = True, False
        self._patience.begin_again()
        self._begin_from_plan()
        told = {"directory": self.directory, "given": self._given, "interval": self._plan.interval}
        told |= {"metric": self._keep.metric, "lost": self.inventory.lost}
        return {m.rank: told for m in roster.members}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""
        if self._running and not self._planned:
            self._begin_from_plan()
        if self._patience.ending and self.outstanding:
            self._host.recheck()
        self._look_whether_it_is_slow(now)

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`. A completed job's last step is saved too, from memory, in one directory.

        A write is waited for as long as the storage takes something; where it has taken nothing for the grace time,
        the job ends without it, and its exit status says so.
        """
        self._running = False
        if self._writers_begun is None:
            return True
        if self._save is not None and self._save.token != self._last:
            self._hear(self._save.token, commit.Stopped("the job ended before every rank came to it"))
        if completed and self._behind is None and not self._final_tried and self._save is None:
            self._final_tried = True
            self._save_last()
        if self._save is None:
            self._remove_the_condemned()
        return not self.outstanding or self._waited_enough()

    def durable(self) -> int:
        """See `DurableCompanion.durable`."""
        return self.inventory.newest or 0

    def _waited_enough(self) -> bool:
        left = self._patience.left_s(self._host.clock.now())
        if left > 0:
            self._host.later(left + 0.01)
        return left <= 0

    def close(self) -> None:
        """See `Companion.close`. Also after a start that was refused."""
        if self._writers_begun is not None:
            self._writers.close()
        self._hold.close()

    # stock of the directory

    def _take_stock(self, findings: Findings) -> None:
        """Name each wound of what is newer than the newest whole one."""
        self.inventory.know(findings)
        newest = self.inventory.newest
        for wound in findings.wounds:
            self._host.emit(
                TierEvent(tier=self.tier, what="damaged", step=wound.step, text=f"{wound.file} {wound.reason}")
            )
            taken = "it is skipped" if newest is None else f"step {newest} is taken"
            path = self.inventory.path(wound.step)
            self._notice(f"damaged checkpoint {path}: {wound.file} {wound.reason}; {taken}", "error")
        self._check_that_all_is_read(findings)

    def _check_that_all_is_read(self, findings: Findings) -> None:
        """One that cannot be read may be whole, and the newest: to take an older one for it is not for us."""
        for away in findings.unread[:1]:
            raise unreachable(f"{self.inventory.path(away.step)}/{away.file}", away.reason.removeprefix(f"{NOW}: "))

    def _check_that_one_is_whole(self) -> None:
        """Where all that is there is damaged, a person decides: to begin anew is not for us."""
        disks = [self._behind or self, self]
        if any(disk.inventory.complete for disk in disks):
            return
        for disk in disks:
            if disk.findings is not None:
                disk.inventory.check(disk.findings.wounds)

    def _continue(self, step: int, total: int) -> None:
        told = self.inventory.continuing(step, total, self._host.world_size)
        if told is not None:
            self._notice(*told)

    def _strike(self, step: int, text: str) -> None:
        if step not in self.inventory.struck:
            self.inventory.struck.add(step)
            self._host.emit(TierEvent(tier=self.tier, what="damaged", step=step, text=text))
            self._notice(f"damaged checkpoint {self.inventory.path(step)}: {text}; the next best is taken", "error")

    # intents

    def _next(self) -> None:
        """Choose the next intent and tell the ranks, where a generation runs and no save is open."""
        ready = self._writers_begun is not None and self._running and self._planned
        if not ready or self._save is not None or self._writers.given_up:
            return
        mine = [s.step for s in self._shelf.sealed_here() if (s.epoch, s.generation) == self._lineage]
        self._plan, choice = intents.choose(intents.saw(self._plan, max(mine, default=0)))
        for step in choice.left_out:
            self._host.emit(TierEvent(tier=self.tier, what="coalesced", step=step, text=choice.reason))
        save = self._open(choice.step, *self._lineage)
        self._host.emit(TierEvent(tier=self.tier, what="planned", step=save.step, text=choice.reason))
        self._tell({"kind": f"{self.prefix}.intent", "save": save.token, "step": save.step})

    def _begin_from_plan(self) -> None:
        """Choose steps behind the one that the generation begins from; that may be known a little later."""
        began = self._shelf.plan
        self._planned = began is not None
        if began is not None:
            self._plan = intents.rewind(self._plan, max(0, began.parent))
            self._next()

    def _all_staged(self, save: commit.Save) -> None:
        self._plan = intents.saw(self._plan, save.step)
        super()._all_staged(save)

    def _save_last(self) -> None:
        """Save the newest step that memory holds whole, unless it is durable already."""
        whole = newest_common(self._host.world_size, self._shelf.sealed(), *self._lineage, self._shelf.plan)
        if not whole or whole[0].step in self.inventory.complete or self._writers.given_up:
            return
        token = self._last = self._open(whole[0].step, whole[0].epoch, whole[0].generation).token
        for snapshot in whole:
            self._staged(snapshot.rank, token, snapshot.buffer)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
