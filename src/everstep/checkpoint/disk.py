"""The disk tier as it rides on the agent: intents to the ranks, snapshots to the writers, commits, retention.

It decides nothing itself: which step (core/intents.py), how far a save is (core/commit.py), what goes
(core/retention.py). It carries messages between ranks, writers and those, and never touches the disk while the job
runs: a writer does. Nothing that happens to a save stops training; every end of one is an event, and each failure is
a notice at once, a word to every rank, and a sentence in the exit status.

    rank ◀─ disk.intent {save, step}              rank ─▶ disk.staged {save, buffer}  or  disk.late {save, step}
    rank ◀─ disk.void {save}, disk.problem {text}
    rank ─▶ disk.damaged {step, text}             (a restore could not read it: the next best is taken)
    rank ─▶ disk.restored {step, total}           (rank 0: the job goes on from it; said where an earlier job saved it)
    rank ─▶ disk.measured {step, metrics}         (rank 0, of a step that is saved: by them the best are kept)
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from everstep import ranks
from everstep.checkpoint import catalog
from everstep.checkpoint.core import commit, intents, names, retention
from everstep.checkpoint.core.final import newest_common
from everstep.checkpoint.core.findings import Findings
from everstep.checkpoint.core.plan import Committed, Plan, Sealed
from everstep.checkpoint.holder import Hold, OwnHold
from everstep.checkpoint.inventory import Inventory
from everstep.checkpoint.patience import GRACE_S, Patience
from everstep.checkpoint.writers import Writers
from everstep.events import Notice, TierEvent
from everstep.recovery.api import Child, Host, Message
from everstep.recovery.core.words import Roster

TIER = catalog.TIER
SLOW_WRITE_S = 120.0


class Source(Protocol):
    """What the disk tier asks of whoever holds the snapshots (`shelf.Shelf`)."""

    @property
    def plan(self) -> Plan | None:
        """From what the present generation began; decided before `on_roster` comes to this tier."""
        ...

    def fd(self, rank: int, buffer: int) -> int:
        """The descriptor of a buffer; stays the shelf's."""
        ...

    def hold(self, rank: int, buffer: int) -> None:
        """Keep a buffer from being overwritten, whatever becomes of its worker."""
        ...

    def release(self, rank: int, buffer: int) -> None:
        """A buffer may be overwritten again; its worker is told."""
        ...

    def sealed(self) -> Sequence[Sealed]:
        """All snapshots that are whole now."""
        ...


class Disk:
    """Companion `disk`. `keep`: what stays, a number: the newest so many, None: all."""

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
    ) -> None:
        self.prefix = self.tier = tier
        self._plan = intents.Plan(interval)
        self._keep = retention.keep_of(keep)
        self._shelf = shelf
        self._hold = hold or OwnHold(directory)
        self.directory, self._given = self._hold.directory, directory
        self._save: commit.Save | None = None
        self._lineage = (0, 0)
        self._buffers: dict[int, int] = {}
        self._asked_s = 0.0
        self._patience = Patience(grace_s)
        self._attempts = 0
        self.inventory = Inventory(self.directory, tier)
        self._condemned: list[int] = []
        self._problems: list[str] = []
        self._running = False  # a generation is under way
        self._final_tried = False
        self._writers_begun: Writers | None = None

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host = host
        findings = self._hold.open(host.run_dir)
        for text in findings.told:
            self._notice(text.removeprefix("warning: "), "warning" if text.startswith("warning: ") else "info")
        self._take_stock(findings)
        self._writers_begun = Writers(host, self.directory, self._hold.lock, self._patience.sign_s)
        self._writers.start()

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
                self._staged(rank, message["save"], message["buffer"])
            case "late":
                self._late(rank, message["save"], message["step"])
            case "damaged":
                self._strike(message["step"], message["text"])
            case "restored":
                self._continue(message["step"], message["total"])
            case "measured":
                self.inventory.metrics[message["step"]] = message["metrics"]
            case _:
                return

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
        began = self._shelf.plan
        self._plan = intents.rewind(self._plan, max(0, began.parent) if began else 0)
        self._running, self._final_tried = True, False
        self._patience.begin_again()
        self._next()
        told = {"directory": self.directory, "given": self._given, "interval": self._plan.interval}
        told["metric"] = self._keep.metric
        return {m.rank: told for m in roster.members}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""
        if self._patience.ending and self.outstanding:
            self._host.recheck()
        save = self._save
        if save is None or save.phase is not commit.Phase.WRITING or now - self._asked_s < SLOW_WRITE_S:
            return
        self._asked_s = now
        silent = self._patience.silent_s(now)
        state = "slow" if silent < SLOW_WRITE_S else f"stuck: it has taken nothing for {silent:.0f} s"
        self._notice(
            f"the checkpoint of step {save.step} has been in writing for over {SLOW_WRITE_S:.0f} s (waiting for the "
            f"writer of rank {self._waiting_for(save)}): storage is {state}; training goes on without it",
            "warning",
        )
        self._host.later(SLOW_WRITE_S)

    def _waiting_for(self, save: commit.Save) -> str:
        missing = set(range(save.world_size)) - set(save.written)
        return ranks.brief(missing) if missing else str(save.merger)

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`. A completed job's last step is saved too, from memory.

        A write is waited for as long as the storage takes something; where it has taken nothing for the grace time,
        the job ends without it, and its exit status says so.
        """
        self._running = False
        if self._writers_begun is None:
            return True
        if self._save is not None:
            self._hear(self._save.token, commit.Stopped("the job ended before every rank came to it"))
        if completed and not self._final_tried and self._save is None:
            self._final_tried = True
            self._save_last()
        if self._save is None and self._condemned and self._writers.prune([], self._folders(self._condemned)):
            self._condemned = []
        return not self.outstanding or self._waited_enough()

    def _waited_enough(self) -> bool:
        left = self._patience.left_s(self._host.clock.now())
        if left > 0:
            self._host.later(left + 0.01)
        return left <= 0

    def _unsaved(self, save: commit.Save) -> str:
        waiting = self._waiting_for(save)
        return f"the checkpoint of step {save.step} was not saved (waiting for the writer of rank {waiting})"

    @property
    def outstanding(self) -> bool:
        """True while writers have something to do."""
        save = self._save
        busy = self._writers_begun is not None and self._writers_begun.busy
        return busy or (save is not None and save.phase is not commit.Phase.ASKED)

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        save = self._save
        if self.outstanding and self._patience.gave_up:
            what = "what was retired is not removed" if save is None else self._unsaved(save)
            return (*self._problems, self._patience.told(what, self.directory))
        if not self.outstanding or save is None:
            return tuple(self._problems)
        return (*self._problems, f"the checkpoint of step {save.step} was still being written when the job ended")

    def close(self) -> None:
        """See `Companion.close`. Also after a start that was refused."""
        if self._writers_begun is not None:
            self._writers.close()
        self._hold.close()

    @property
    def _writers(self) -> Writers:
        assert self._writers_begun is not None, "start() comes first"
        return self._writers_begun

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
        self.inventory.check(findings.wounds)

    def _continue(self, step: int, total: int) -> None:
        told = self.inventory.continuing(step, total, self._host.world_size)
        if told is not None:
            self._notice(*told)

    def _strike(self, step: int, text: str) -> None:
        if step not in self.inventory.struck:
            self.inventory.struck.add(step)
            self._host.emit(TierEvent(tier=self.tier, what="damaged", step=step, text=text))
            self._notice(f"damaged checkpoint {self.inventory.path(step)}: {text}; the next best is taken", "error")

    # one save

    def _next(self) -> None:
        """Choose the next intent and tell the ranks, where a generation runs and no save is open."""
        if not self._running or self._save is not None or self._writers.given_up:
            return
        mine = [s.step for s in self._shelf.sealed() if (s.epoch, s.generation) == self._lineage]
        self._plan, choice = intents.choose(intents.saw(self._plan, max(mine, default=0)))
        for step in choice.left_out:
            self._host.emit(TierEvent(tier=self.tier, what="coalesced", step=step, text=choice.reason))
        save = self._open(choice.step, *self._lineage)
        self._host.emit(TierEvent(tier=self.tier, what="planned", step=save.step, text=choice.reason))
        self._tell({"kind": f"{self.prefix}.intent", "save": save.token, "step": save.step})

    def _open(self, step: int, epoch: int, generation: int) -> commit.Save:
        self._attempts += 1
        token = str(names.Staging(step, epoch, generation, self._hold.job, self._attempts))
        self._save = commit.Save(token, step, self._host.world_size)
        return self._save

    def _save_last(self) -> None:
        """Save the newest step that memory holds whole, unless it is durable already."""
        whole = newest_common(self._host.world_size, self._shelf.sealed(), *self._lineage, self._shelf.plan)
        if not whole or whole[0].step in self.inventory.complete or self._writers.given_up:
            return
        token = self._open(whole[0].step, whole[0].epoch, whole[0].generation).token
        for snapshot in whole:
            self._staged(snapshot.rank, token, snapshot.buffer)

    def _staged(self, rank: int, token: str, buffer: int) -> None:
        if not self._is(token) or rank in self._buffers:
            self._shelf.release(rank, buffer)  # it came after the save was void
            return
        self._shelf.hold(rank, buffer)
        self._buffers[rank] = buffer
        self._hear(token, commit.Staged(rank))

    def _is(self, token: object) -> bool:
        return self._save is not None and self._save.token == token

    def _hear(self, token: object, event: commit.Event, size: int = 0) -> None:
        if self._save is None or not self._is(token):
            return
        before = self._save
        self._save, commands = commit.hear(before, event)
        if before.phase is commit.Phase.ASKED and self._save.phase is commit.Phase.WRITING:
            self._all_staged(self._save)
        for command in commands:
            self._do(self._save, command)
        if self._save.ended:
            self._end(self._save, size)

    def _all_staged(self, save: commit.Save) -> None:
        self._plan = intents.saw(self._plan, save.step)
        self._asked_s = self._host.clock.now()
        self._patience.moved(self._asked_s)
        self._host.emit(TierEvent(tier=self.tier, what="taken", step=save.step))
        self._host.later(SLOW_WRITE_S)

    def _do(self, save: commit.Save, command: commit.Command) -> None:
        match command:
            case commit.Write(rank):
                self._writers.write(rank, save.token, self._shelf.fd(rank, self._buffers[rank]), save.world_size)
            case commit.Release(rank):
                self._shelf.release(rank, self._buffers.pop(rank))
            case commit.Merge(rank):
                self._writers.merge(rank, save.token, self.inventory.metrics.get(save.step, {}))
            case commit.Withdraw():
                self._tell({"kind": f"{self.prefix}.void", "save": save.token})
            case commit.Discard():
                self._writers.discard(save.token)

    def _end(self, save: commit.Save, size: int) -> None:
        seconds = self._host.clock.now() - self._asked_s
        self._save = None
        self._buffers.clear()
        self._writers.forget_fragments()
        ends: dict[commit.Phase, Callable[[], None]] = {
            commit.Phase.COMMITTED: lambda: self._durable(save, size, seconds),
            commit.Phase.VOID: lambda: self._host.emit(
                TierEvent(tier=self.tier, what="skipped", step=save.step, text=save.text)
            ),
            commit.Phase.FAILED: lambda: self._failed(save, seconds),
        }
        ends[save.phase]()
        self._ended(save)
        self._next()
        self._host.recheck()

    def _ended(self, save: commit.Save) -> None:
        """A save has come to its end, and the next is not chosen yet."""

    def _durable(self, save: commit.Save, size: int, seconds: float) -> None:
        self.inventory.add(save.step, save.world_size)
        self._host.emit(TierEvent(tier=self.tier, what="committed", step=save.step, bytes=size, seconds=seconds))
        decision = self.inventory.going(self._keep, besides=save.step)
        going = decision.remove
        if not going and not self._condemned:
            return
        if self._writers.prune(self._folders(going), self._folders(self._condemned)):
            self.inventory.complete -= set(going)
            self._condemned = list(going)
            for step in going:
                self._host.emit(TierEvent(tier=self.tier, what="removed", step=step, text=decision.reason))

    def _failed(self, save: commit.Save, seconds: float) -> None:
        newest = self.inventory.newest
        stands = "none is durable yet" if newest is None else f"the newest durable one is of step {newest}"
        text = f"the checkpoint of step {save.step} was not saved: {save.text}"
        self._problems.append(text)
        self._host.emit(TierEvent(tier=self.tier, what="failed", step=save.step, seconds=seconds, text=save.text))
        self._notice(f"{text}. Training goes on; {stands}.", "error")
        self._tell({"kind": f"{self.prefix}.problem", "text": text})
        if self._condemned and self._writers.prune([], self._folders(self._condemned)):
            self._condemned = []  # their room may be what was missing

    # words

    def _tell(self, message: Message) -> None:
        for rank in range(self._host.world_size):
            self._host.send(rank, message)

    def _notice(self, text: str, level: str) -> None:
        self._host.emit(Notice(text=text, level=level))

    def _folders(self, steps: Sequence[int]) -> list[str]:
        return [names.committed(step) for step in steps]


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
