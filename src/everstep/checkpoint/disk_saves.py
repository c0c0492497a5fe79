"""One save after another of one directory: what is asked of ranks and writers, and what becomes of it.

What follows from what is core/commit.py's, what goes is core/retention.py's; this carries it out. Nothing that happens
to a save stops training; every end of one is an event, and each failure is a notice at once, a word to every rank, and
a sentence in the exit status.
"""

from collections.abc import Callable, Sequence

from everstep import ranks
from everstep.checkpoint.core import commit, names, retention
from everstep.checkpoint.holder import Hold
from everstep.checkpoint.inventory import Inventory
from everstep.checkpoint.patience import Patience
from everstep.checkpoint.source import Source
from everstep.checkpoint.writers import Writers
from everstep.events import Notice, TierEvent
from everstep.recovery.api import Host, Message

SLOW_WRITE_S = 120.0


class Saves:
    """The part of a disk tier that knows of the save that is open. `lesser`: another directory is behind this one."""

    def __init__(
        self, tier: str, shelf: Source, hold: Hold, keep: retention.Keep | int | None, grace_s: float, *, lesser: bool
    ) -> None:
        self.prefix = self.tier = tier
        self._shelf, self._hold, self._keep, self._lesser = shelf, hold, retention.keep_of(keep), lesser
        self.directory = hold.directory
        self.inventory = Inventory(self.directory, tier)
        self._patience = Patience(grace_s)
        self._save: commit.Save | None = None
        self._lineage = (0, 0)
        self._buffers: dict[int, int] = {}
        self._asked_s = 0.0
        self._attempts = 0
        self._condemned: list[int] = []
        self._problems: list[str] = []
        self._unmet: dict[str, int] = {}  # a problem that a later save of the same step mends
        self._writers_begun: Writers | None = None
        self._host_given: Host | None = None

    @property
    def _host(self) -> Host:
        assert self._host_given is not None, "start() comes first"
        return self._host_given

    @property
    def _writers(self) -> Writers:
        assert self._writers_begun is not None, "start() comes first"
        return self._writers_begun

    @property
    def outstanding(self) -> bool:
        """True while writers have something to do."""
        save = self._save
        busy = self._writers_begun is not None and self._writers_begun.busy
        return busy or (save is not None and save.phase is not commit.Phase.ASKED)

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        if self._lesser:
            return ()
        save = self._save
        if self.outstanding and self._patience.gave_up:
            what = "what was retired is not removed" if save is None else self._unsaved(save)
            return (*self._problems, self._patience.told(what, self.directory))
        if not self.outstanding or save is None:
            return tuple(self._problems)
        return (*self._problems, f"the checkpoint of step {save.step} was still being written when the job ended")

    def _waiting_for(self, save: commit.Save) -> str:
        missing = set(range(save.world_size)) - set(save.written)
        return ranks.brief(missing) if missing else str(save.merger)

    def _unsaved(self, save: commit.Save) -> str:
        waiting = self._waiting_for(save)
        return f"the checkpoint of step {save.step} was not saved (waiting for the writer of rank {waiting})"

    def _look_whether_it_is_slow(self, now: float) -> None:
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

    # from its beginning to its end

    def _open(self, step: int, epoch: int, generation: int) -> commit.Save:
        self._attempts += 1
        token = str(names.Staging(step, epoch, generation, self._job, self._attempts))
        self._save = commit.Save(token, step, self._host.world_size)
        return self._save

    @property
    def _job(self) -> str:
        return self._hold.job

    def _staged(self, rank: int, token: str, buffer: int, offer: int = 0) -> None:
        if not self._is(token) or rank in self._buffers:
            self._decline(rank, buffer, offer)  # it came after the save was void
            return
        self._shelf.hold(rank, buffer, offer)
        self._buffers[rank] = buffer
        self._hear(token, commit.Staged(rank))

    def _decline(self, rank: int, buffer: int, offer: int) -> None:
        """What a rank keeps for us is not read; where it is gone (offer 0) there is nobody to be told."""
        if offer:
            self._shelf.release(rank, buffer, offer)

    def _is(self, token: object) -> bool:
        return self._save is not None and self._save.token == token

    def _hear(self, token: object, event: commit.Event, size: int = 0) -> None:
        if self._save is None or not self._is(token):
            return
        before = self._save
        self._save, commands = commit.hear(before, event)
        if before.phase is commit.Phase.ASKED and self._save.phase is commit.Phase.WRITING:
            self._all_staged(self._save)
        save = self._save
        for command in commands:
            self._do(save, command)
        if self._save is save and save.ended:  # what a command met, a line that broke, may have ended it already
            self._end(save, size)

    def _all_staged(self, save: commit.Save) -> None:
        self._asked_s = self._host.clock.now()
        self._patience.moved(self._asked_s)
        self._host.emit(TierEvent(tier=self.tier, what="taken", step=save.step))
        self._host.later(SLOW_WRITE_S)

    def _do(self, save: commit.Save, command: commit.Command) -> None:
        match command:
            case commit.Write(rank):
                self._order(rank, save)
            case commit.Release(rank):
                if rank in self._buffers:  # its end has let go of them, where one command met another
                    self._shelf.release(rank, self._buffers.pop(rank))
            case commit.Merge(rank):
                self._writers.merge(rank, save.token, self.inventory.metrics.get(save.step, {}))
            case commit.Withdraw():
                self._tell({"kind": f"{self.prefix}.void", "save": save.token})
            case commit.Discard():
                self._writers.discard(save.token)

    def _order(self, rank: int, save: commit.Save) -> None:
        self._writers.write(rank, save.token, self._shelf.fd(rank, self._buffers[rank]), save.world_size)

    def _end(self, save: commit.Save, size: int) -> None:
        seconds = self._host.clock.now() - self._asked_s
        self._save = None
        while self._buffers:
            self._shelf.release(*self._buffers.popitem())
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

    def _next(self) -> None:
        """Choose the next one, where there is none and one is wanted."""

    def _durable(self, save: commit.Save, size: int, seconds: float) -> None:
        self.inventory.add(save.step, save.world_size)
        for text in [text for text, step in self._unmet.items() if step == save.step]:
            self._problems.remove(text)
            del self._unmet[text]
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
        where = f" on {self.tier}" if self._lesser else ""
        text = f"the checkpoint of step {save.step} was not saved{where}: {save.text}"
        self._host.emit(TierEvent(tier=self.tier, what="failed", step=save.step, seconds=seconds, text=save.text))
        self._notice(f"{text}. Training goes on; {stands}.", "warning" if self._lesser else "error")
        if not self._lesser:
            if text not in self._unmet:
                self._problems.append(text)
                self._unmet[text] = save.step
            self._tell({"kind": f"{self.prefix}.problem", "text": text})
        self._remove_the_condemned()  # their room may be what was missing

    def _remove_the_condemned(self) -> None:
        if self._condemned and self._writers.prune([], self._folders(self._condemned)):
            self._condemned = []

    # words

    def _tell(self, message: Message) -> None:
        for rank in range(self._host.world_size):
            self._host.send(rank, message)

    def _notice(self, text: str, level: str) -> None:
        self._host.emit(Notice(text=text, level=level))

    def _folders(self, steps: Sequence[int]) -> list[str]:
        return [names.committed(step) for step in steps]
