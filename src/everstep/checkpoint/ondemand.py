"""The disk tier of a plain loop: what is saved is what the ranks offer, when the disk is free; each offer has a fate.

Nobody knows a plain loop's next step beforehand, so a save is known by its number: the n-th snapshot of every rank is
of one step. Which number is written is decided here, once for all ranks (EXPERIMENTS C1), and is the newest that any
rank has offered: whoever has not come to it yet is told before it does, and whoever has still holds it. All else of a
save, a failure and a removal is the disk tier's (disk.py).

    rank ─▶ offer {number, step, buffer, due, hold, metrics}
                                                        its snapshot is taken; `due`: it is this tier's to save; `hold`:
                                                        the buffer is kept, by a hold of that number (0: it is not),
                                                        until it is wanted, or another is
    rank ◀─ want {ask, number}                          keep the buffer of that number, now or when you come to it
    rank ─▶ staged {ask, step, buffer, hold}, late {ask}
                                                        (late: it has been overwritten: the next is asked ahead of all)
    rank ◀─ fate {number, what, step, text, alone}      committed, skipped, failed

Rule 1: a rank that is gone wrote its last word into its buffers: this side speaks for it, by their headers.
Rule 2: earlier numbers without a fate share that of a later one, unless it is said `alone`: they were left out for it
and are coalesced when it is durable, failed when it fails.
Rule 3: a number whose ranks do not name one step is refused by name: two states have one number.
Rule 4: storage that has taken nothing for the grace time is stuck: the save that waits for it fails by name, and every
other at once, until it takes something again. A stuck writer's buffer is free: its header tells what became of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.checkpoint.core import commit, retention
from everstep.checkpoint.core.findings import Findings
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.holder import Hold
from everstep.checkpoint.patience import GRACE_S
from everstep.checkpoint.source import Source
from everstep.checkpoint.storage import opening
from everstep.checkpoint.unreachable import deadline_s
from everstep.events import TierEvent
from everstep.recovery.api import Child, Message
from everstep.recovery.core.words import Roster

AHEAD_S = 0.5
"""A number that was asked ahead and that no rank comes to in this time is asked no more: the loop has paused."""
LOOK_S = 0.05
DESCRIBE_S = 60.0
"""What describes a checkpoint for DCP is loaded once, which takes its time, and no storage."""
MOST_AHEAD = 64
REMEMBERED = 16
"""Numbers of which it is known what lies where: more than a rank has buffers."""
_RESTORED = "the ranks restored another state before it was written"
COMMITTED, COALESCED, SKIPPED, FAILED = "committed", "coalesced", "skipped", "failed"


@dataclass
class _Offer:
    """The snapshots of one number."""

    step: int
    due: bool
    buffers: dict[int, int] = field(default_factory=dict[int, int])  # by rank


class OnDemand(Disk):
    """Companion of one directory. `skip`: what comes while a save is written is not saved, rather than coalesced."""

    def __init__(
        self,
        directory: str,
        shelf: Source,
        keep: retention.Keep | int | None,
        tier: str,
        *,
        skip: bool = False,
        hold: Hold | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        super().__init__(directory, 1, shelf, keep, tier, hold=hold, grace_s=grace_s)
        self._skip = skip
        self._limit_s = grace_s + (deadline_s() if opening.is_url(self.directory) else 0.0)  # a store has its own
        self._stuck = ""  # why no save is begun
        self._described = False  # a first one was
        self.durable_s: dict[int, float] = {}  # monotonic time at which a checkpoint became durable, by step
        self.wounds: list[tuple[int, str]] = []  # step, sentence: found when the directory was taken
        self.unread: list[tuple[int, str]] = []  # the same of what could not be read
        self._offers: dict[int, _Offer] = {}
        self._newest: dict[int, int] = {}  # the last number of each rank
        self._away: dict[int, str] = {}  # ranks that write no more, and why
        self._asks = 0
        self._ask: int | None = None  # the question, and then the save, that is open
        self._number = 0  # that it is about
        self._lates = 0  # answers "late" in a row
        self._parked: dict[int, tuple[int, int, int]] = {}  # rank → number, buffer, hold: on the chance it is wanted
        self._forgotten: tuple[int, int] | None = None  # the last number that is not remembered and has no fate yet
        self._void_forgotten: tuple[int, int] | None = None  # the same, of before a restore
        self._left_behind: frozenset[int] = frozenset()

    # what the keeper says

    def away(self, rank: int, why: str) -> None:
        """A rank has closed or ended: nothing more comes of it."""
        self._away.setdefault(rank, why)
        save = self._save
        if self._ask is not None and save is None:
            self._ask = None  # asked anew, of who is left
        elif save is not None and save.phase is commit.Phase.ASKED and rank not in save.staged:
            self._speak_for(rank, save)
        self._next()

    def went_back(self, step: int | None) -> None:
        """The ranks have restored `step`: what is newer on disk is left behind once something newer is durable."""
        newer = (self.inventory.complete | self.inventory.unread) - self.inventory.struck
        self._left_behind = frozenset(s for s in newer if step is not None and s > step)

    # Disk

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`: what was offered and not begun belongs to a line that has ended."""
        self.on_stopped(self._lineage[1])
        self._parked.clear()
        if self._save is None:
            self._ask = None
        for number, offer in self._offers.items():
            if offer.due and not (number == self._number and self._save is not None):
                self._settle(number, SKIPPED, _RESTORED, alone=True)
        self._void_forgotten, self._forgotten = self._forgotten or self._void_forgotten, None
        self._settle_the_void()
        return super().on_roster(roster)

    def _settle_the_void(self) -> None:
        """What was forgotten before a restore has its fate when the save that was open then has."""
        if self._void_forgotten is not None and self._save is None:
            (number, step), self._void_forgotten = self._void_forgotten, None
            self._tell_fate(number, step, SKIPPED, _RESTORED, alone=False)

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`. All ranks are away by then."""
        self._next()
        return self._save is None and super().drained(completed)

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""
        super().on_tick(now)
        self._look_whether_it_moves(now)
        ahead = self._ask is not None and self._number > max(self._newest.values(), default=0)
        if ahead and now - self._asked_s >= AHEAD_S:
            self._lates = 1
            self._not_whole("no rank came to it")

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`: whatever a writer says, its storage moves."""
        self._stuck = ""
        super().on_child_message(child, message, fds)

    def _all_staged(self, save: commit.Save) -> None:
        super()._all_staged(save)
        self._host.later(self._limit_s)

    def _look_whether_it_moves(self, now: float) -> None:
        save = self._save
        if save is None or save.phase not in (commit.Phase.WRITING, commit.Phase.MERGING):
            return
        silent, limit = self._patience.silent_s(now), self._limit_s
        if save.phase is commit.Phase.MERGING and not self._described:
            limit += DESCRIBE_S
        if silent < limit:
            self._host.later(limit - silent + LOOK_S)
            return
        self._stuck = (
            f"its storage has taken nothing for {silent:.0f} s: it is stuck, or gone. See whether `ls "
            f"{self.directory}` returns, and mend the mount; grace= is how long it is waited for"
        )
        missing = sorted(set(range(save.world_size)) - set(save.written))
        self._hear(save.token, commit.Refused(missing[0] if missing else save.merger, self._stuck))

    def _save_last(self) -> None:
        if not self._stuck:
            super()._save_last()

    def _take_stock(self, findings: Findings) -> None:
        """What is whole is known; what is not is named, and never in the way of what is."""
        self.inventory.know(findings)
        now, wall = self._host.clock.now(), self._host.clock.wall()
        self.durable_s = {one.step: now - max(0.0, wall - one.changed_s) for one in findings.found}
        for wound in findings.wounds:
            text = f"{wound.file} {wound.reason}"
            self.wounds.append((wound.step, f"step {wound.step} on {self.tier} is damaged ({text})"))
            self._host.emit(TierEvent(tier=self.tier, what="damaged", step=wound.step, text=text))
            self._notice(f"damaged checkpoint {self.inventory.path(wound.step)}: {text}; it is skipped", "error")
        for away in findings.unread:
            text = f"{self.inventory.path(away.step)}/{away.file} {away.reason}"
            self.unread.append((away.step, f"step {away.step} on {self.tier} may be newer ({text})"))
            self._notice(f"{text}; a restore tries it again, and takes nothing older by itself", "error")

    def _check_that_one_is_whole(self) -> None:
        """A restore says what is not."""

    def _said(self, rank: int, verb: str, message: Message) -> None:
        match verb:
            case "offer" | "staged" | "late" if rank in self._away:
                return  # we speak for it by now: what it keeps for an old question is nobody's
            case "offer":
                self._offered(rank, message)
            case "staged":
                self._kept(rank, message)
            case "late":
                self._unpark(rank)
                if message["ask"] == self._ask:
                    self._lates += 1
                    self._not_whole(f"rank {rank} had overwritten it")
            case _:
                super()._said(rank, verb, message)

    # offers

    def _offered(self, rank: int, message: Message) -> None:
        number, step = int(message["number"]), int(message["step"])
        self._newest[rank] = max(number, self._newest.get(rank, 0))
        offer = self._offers.setdefault(number, _Offer(step, bool(message["due"])))
        offer.buffers[rank] = int(message["buffer"])
        if message["hold"]:
            self._unpark(rank)
            self._parked[rank] = number, offer.buffers[rank], int(message["hold"])
        if message.get("metrics"):
            self.inventory.metrics[step] = message["metrics"]
        if offer.step != step:
            self._contradicted(number, rank, step, offer.step)
        elif self._skip and offer.due and len(offer.buffers) == 1 and self._ask is not None and self._number != number:
            self._settle(number, SKIPPED, "another save was being written", alone=True)
        self._next()
        if len(self._offers) > REMEMBERED:
            self._forget()

    def _contradicted(self, number: int, rank: int, step: int, other: int) -> None:
        text = (
            f"save number {number} is of step {step} on rank {rank} and of step {other} elsewhere: call save() on "
            "every rank, at the same steps"
        )
        if self._number == number and self._ask is not None:
            self._not_whole(text)
        self._settle(number, FAILED, text, alone=True)

    def _forget(self) -> None:
        """What is left out is not remembered for ever: its ranks know that the next fate is theirs too (rule 2).

        Nor is it held: what comes next is newer.
        """
        for number in sorted(self._offers)[:-REMEMBERED]:
            if number != self._number:
                offer = self._offers.pop(number)
                for rank in [r for r, parked in self._parked.items() if parked[0] == number]:
                    self._unpark(rank)
                if offer.due:
                    self._forgotten = number, offer.step
                    self._host.emit(TierEvent(tier=self.tier, what=COALESCED, step=offer.step))

    def _settle_the_forgotten(self) -> None:
        """Where a rank is gone, no later fate may come that is theirs too."""
        if self._away and self._forgotten is not None:
            (number, step), self._forgotten = self._forgotten, None
            self._tell_fate(number, step, FAILED, "left out for newer ones, of which none could be saved", alone=False)

    # asking

    def _next(self) -> None:
        """Ask for the newest number that any rank has offered, of those that every rank can still come to."""
        while self._save is None and self._ask is None and self._running:
            due = sorted((number for number, offer in self._offers.items() if offer.due), reverse=True)
            if not due:
                self._settle_the_forgotten()
                return
            number = next((n for n in due if all(self._speaks(rank, n) for rank in self._away)), None)
            if number is None or self._writers.given_up or self._stuck:
                self._settle(due[0], FAILED, self._hopeless(due[0]))
                continue
            for beyond in [n for n in due if n > number]:
                self._settle(beyond, FAILED, self._hopeless(beyond), alone=True)
            self._want(number)

    def _want(self, number: int) -> None:
        self._asks += 1
        self._ask, self._number = self._asks, self._chosen(number)
        self._asked_s = self._host.clock.now()
        for rank in self._away:
            buffer = self._buffer(rank, number)
            self._kept(rank, {"ask": self._ask, "step": self._offers[number].step, "buffer": buffer, "hold": 0})
        for rank in range(self._host.world_size):
            if rank not in self._away:
                self._host.send(rank, {"kind": f"{self.prefix}.want", "ask": self._ask, "number": self._number})
        if self._number > max(self._newest.values()):
            self._host.later(AHEAD_S * 1.1)

    def _chosen(self, due: int) -> int:
        """The newest that is held somewhere, else the newest that is due.

        Where that was overwritten: the newest of all, and then one that no rank has come to yet.
        """
        if self._away:
            return due
        if not self._lates:
            parked = [number for number, _, _ in self._parked.values() if self._offers[number].due]
            return max(parked, default=due)
        return max(self._newest.values()) + (0 if self._lates == 1 else min(MOST_AHEAD, 2 ** (self._lates - 2)))

    def _unpark(self, rank: int) -> None:
        """What was held on a chance is not wanted, or is held by another hold now."""
        parked = self._parked.pop(rank, None)
        if parked is not None:
            self._decline(rank, parked[1], parked[2])

    def _kept(self, rank: int, message: Message) -> None:
        """A rank keeps a buffer for us: whole when all do."""
        buffer, step, hold = int(message["buffer"]), int(message["step"]), int(message["hold"])
        self._unpark(rank)
        if message["ask"] != self._ask:
            self._decline(rank, buffer, hold)
            return
        if self._save is None and self._writers.given_up:
            self._decline(rank, buffer, hold)
            self._ask = None
            self._next()
            return
        save = self._save or self._open(step, *self._lineage)
        if save.step != step:
            self._decline(rank, buffer, hold)
            self._contradicted(self._number, rank, step, save.step)
            return
        self._staged(rank, save.token, buffer, hold)

    def _not_whole(self, text: str) -> None:
        """What is asked for cannot be had, on some rank; where a rank is gone, asking again would come to the same."""
        if self._save is not None:
            self._hear(self._save.token, commit.Stopped(text))
            return
        self._ask = None
        self._void(text)
        self._next()

    def _void(self, text: str) -> None:
        if self._away:
            self._settle(self._number, FAILED, text, alone=True)

    def _buffer(self, rank: int, number: int) -> int:
        return self._offers[number].buffers[rank]

    def _speaks(self, rank: int, number: int) -> bool:
        """True where a rank that is gone has left the snapshot of that number."""
        offer = self._offers[number]
        buffer = offer.buffers.get(rank)
        if buffer is None or any(n > number and o.buffers.get(rank) == buffer for n, o in self._offers.items()):
            return False
        wanted = (rank, buffer, offer.step, self._lineage[1])
        return any((s.rank, s.buffer, s.step, s.generation) == wanted for s in self._shelf.sealed())

    def _speak_for(self, rank: int, save: commit.Save) -> None:
        number = self._number
        if number in self._offers and self._speaks(rank, number):
            self._staged(rank, save.token, self._buffer(rank, number))
        else:
            self._hear(save.token, commit.Stopped(f"rank {rank} {self._away[rank]}"))

    def _hopeless(self, number: int) -> str:
        if self._writers.given_up:
            return self._problems[-1] if self._problems else "no writer can be kept alive"
        if self._stuck:
            return self._stuck
        rank = next(r for r in self._away if not self._speaks(r, number))
        return f"rank {rank} {self._away[rank]} and has left no snapshot of it"

    # ends

    def _ended(self, save: commit.Save) -> None:
        asked, self._ask = self._ask, None
        if asked is None:
            return  # the last one, which nobody has offered
        match save.phase:
            case commit.Phase.COMMITTED:
                self._lates = 0
                self._settle(self._number, COMMITTED)
            case commit.Phase.FAILED:
                self._settle(self._number, FAILED, save.text)
            case _:
                self._void(save.text)
        self._settle_the_void()

    def _settle(self, number: int, what: str, text: str = "", *, alone: bool = False) -> None:
        """Tell all ranks what became of a number."""
        offer = self._offers.get(number)
        if offer is None or (alone and not offer.due):
            return
        if offer.due:
            offer.due = False
            self._event(offer.step, what, text)
        for rank, (parked, _, _) in list(self._parked.items()):
            if parked == number or (parked < number and not alone):
                self._unpark(rank)
        for n, other in self._offers.items():
            if n < number and other.due and not alone:
                other.due = False
                self._event(other.step, COALESCED if what == COMMITTED else what, text)
        if not alone:
            self._forgotten = None
        self._tell_fate(number, offer.step, what, text, alone=alone)

    def _tell_fate(self, number: int, step: int, what: str, text: str, *, alone: bool) -> None:
        body = {"number": number, "step": step, "what": what, "text": text, "alone": alone}
        self._tell({"kind": f"{self.prefix}.fate", **body})

    def _event(self, step: int, what: str, text: str) -> None:
        if what in (COALESCED, SKIPPED):
            self._host.emit(TierEvent(tier=self.tier, what=what, step=step, text=text))
        elif what == FAILED and not any(f"step {step} was not saved" in problem for problem in self._problems):
            self._problems.append(f"the checkpoint of step {step} was not saved: {text}")

    def _durable(self, save: commit.Save, size: int, seconds: float) -> None:
        """Also give up what the ranks have gone back behind: whoever restores the newest would come back to it."""
        self.durable_s[save.step], self._described = self._host.clock.now(), True
        there = self.inventory.complete | self.inventory.unread
        behind = sorted((self._left_behind & there) - {save.step})
        self._left_behind = frozenset()
        if behind and self._writers.prune(self._folders(behind), []):
            self.inventory.complete -= set(behind)
            self.inventory.unread -= set(behind)
            for step in behind:
                text = f"left behind: the ranks went back, and step {save.step} is durable"
                self._host.emit(TierEvent(tier=self.tier, what="removed", step=step, text=text))
        super()._durable(save, size, seconds)
        self._condemned += behind
