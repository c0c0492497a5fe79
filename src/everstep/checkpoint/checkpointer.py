"""`Checkpointer`: the one object that a plain training loop holds.

    with Checkpointer("runs/ckpt", interval=100) as ckpt:
        restored = ckpt.restore(state)
        for step in range(restored.step + 1 if restored else 1, steps + 1):
            train(step)
            ckpt.save(step, state)

It needs no launcher and no wrapper. The state is copied into shared memory of a keeper, a small process of its own, and
written from there while the loop goes on: docs/checkpointer.md says what each method does in every case.

Rule 1: nothing here decides what is durable: the keeper does, for all ranks (ondemand.py).
Rule 2: the main thread waits for a copy of the state, and for a write only where it was asked to (`on_busy="block"`,
`Handle.wait`, `restore`, `close`); never for a process that is gone.
Rule 3: a failure is raised by whatever is called next: `save`, `Handle.wait`, `close`; at the latest it ends the
process with a bad exit code.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from everstep.checkpoint import at_exit
from everstep.checkpoint.core.numbering import Numbering
from everstep.checkpoint.core.retention import DEFAULT_KEEP, Keep
from everstep.checkpoint.given import Given, check_name, given, in_our_words
from everstep.checkpoint.handles import Book, Fate, Handle
from everstep.checkpoint.joining import join
from everstep.checkpoint.keeper_line import KeeperLine
from everstep.checkpoint.restored import Restored, Restorer
from everstep.checkpoint.snapshot import Snapshotter, Taken
from everstep.checkpoint.tier_client import TierClient
from everstep.checkpoint.tier_settings import GRACE_S, MAIN, Tiers, settings_of
from everstep.errors import CheckpointError, StateMismatch, UsageError

CLOSE_S = 600.0
EXIT_S = 30.0

OnBusy = Literal["coalesce", "block", "skip"]


class Checkpointer:
    """Saves and restores the state of this rank, and with the other ranks' that of the world.

    Made, called and closed alike on every rank, in the process that made it. Calls of several threads come one after
    another; a call in the midst of another on the same thread (a signal handler's) is a UsageError. A context manager.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - the name that is fixed (issue 4)
        *,
        interval: int = 1,
        on_busy: OnBusy = "coalesce",
        keep: Keep | int | None = DEFAULT_KEEP,
        tiers: Tiers | None = None,
        allow_pickle: bool = False,
        grace: float = GRACE_S,
    ) -> None:
        """Have the directory and the keeper, or raise.

        dir: where checkpoints are committed, a directory, made where it is missing, or the URL of an object store
            (`s3://BUCKET/PREFIX`). One Checkpointer to a place.
        interval: steps that are multiples of it are saved.
        on_busy: what becomes of a step that is due while an earlier one is being written. "coalesce": it is kept in
            memory, and the newest is written as soon as the disk is free. "skip": it is not saved. "block": `save`
            waits until the earlier one is written.
        keep: which checkpoints stay: a number, the newest so many; a `Keep`; None, all.
        tiers: further tiers and intervals of their own: {"memory": 1, "disk": 100, "local": Local("/nvme/ckpt", 10)}.
        allow_pickle: what cannot be kept otherwise (objects of one's own classes) is pickled, and unpickled by
            `restore`, which runs code that the checkpoint names: say so only where you trust whoever wrote it. Without
            it such a thing is refused by its name, at the save and at the restore.
        grace: seconds for which storage that takes or gives nothing is waited for. Then it is stuck: the save fails by
            name (a slow one, of which something moves, does not), `close` ends, a restore raises CheckpointError.

        Ranks may be on several hosts, which share `dir` (docs/checkpointer.md#several-hosts).

        Raises UsageError for arguments that cannot be meant, ConfigurationError where the directory cannot be made,
        written to, locked, or another has it, where a host does not see it, or is not reached by that of rank 0, or no
        process group is made yet, UnreachableStorage where the place is away, or says nothing for `grace` seconds.
        """
        self._settings = settings_of(os.fspath(dir), interval, on_busy, keep, tiers, grace)
        self._pid = os.getpid()
        self._closed = ""
        self._turn, self._doing = threading.RLock(), ""
        self._allow_pickle = bool(allow_pickle)
        joined = join({**self._settings.to_json(), "allow_pickle": self._allow_pickle}, self._pid)
        self.rank, self.world_size = joined.rank, joined.world_size
        self._book = Book(self._dead)
        self._snapshotter = Snapshotter(self._send)
        self._tiers = {
            one.tier: TierClient(one.tier, self._send, self._snapshotter, self._book, told=one.tier == MAIN)
            for one in self._settings.tiers
        }
        self._line = KeeperLine(
            joined.link, int(joined.welcome["pid"]), self._heard, self._keeper_lost, self._snapshotter.poll
        )
        self._snapshotter.begin(self.rank, self.world_size, joined.welcome["told"]["snapshot"])
        self._given: Given | None = None
        self._looked = False  # a first state has been looked through
        self._begun = False  # buffers are asked for in this generation
        self._numbers = Numbering()
        self._last: Handle | None = None
        self._last_step = -1
        self._inherited: int | None = joined.welcome["newest"][MAIN]
        self.directory = self._settings.tiers[0].directory
        at_exit.add(self)

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> Handle:
        """Save `state` as that after `step`; return as soon as it is copied, with a Handle that tells its fate.

        state: names and objects, given anew each time: modules, optimizers, whatever has state_dict and
            load_state_dict, tensors, arrays, plain values, containers of such. What changes later is not in it.
        metrics: numbers by which the best checkpoints are kept (`keep=Keep(best=3, metric="loss")`); rank 0's count.

        A step that is no multiple of the interval returns at once (`not due`). Raises CheckpointError where an earlier
        save has failed, before anything is taken (call it again to save this step), TypeError naming what cannot be
        kept, MemoryShortage, UsageError after `close`, in another process, for steps that go backwards, and where this
        thread is in the midst of another call (it came from a signal handler).
        """
        self._check_process("save")
        with self._turn:
            self._check("save")
            self._doing = "save"
            try:
                return self._save(step, state, metrics or {})
            finally:
                self._doing = ""

    def _save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Handle:
        number = check_name(step)
        due = {name: number % every == 0 for name, every in self._settings.intervals.items()}
        try:
            taken = self._taken(number, state, due)
        except UsageError:
            raise
        except BaseException:
            if any(due.values()):
                self._numbers.pass_over(number)
            raise
        if taken is None:
            return Handle(self._book, number, Fate(number, "not due"))
        count = self._numbers.give(number)
        handle = self._handle(count, number, in_memory=not due[MAIN])
        told = {name: float(value) for name, value in metrics.items()} if self.rank == 0 else {}
        for name, tier in self._tiers.items():
            tier.taken(count, number, taken, due=due[name], metrics=told)
        if not self._snapshotter.poll():
            self._line.copying()
        self._last_step = number
        return handle

    def _taken(self, step: int, state: Mapping[str, Any], due: Mapping[str, bool]) -> Taken | None:
        self._raise_failures()
        if not self._looked:
            given(state)  # names that cannot be are heard of at once, not at the first step that is due
            self._looked = True
        if not any(due.values()):
            return None
        self._check_order(step)
        if self._settings.on_busy == "block" and due[MAIN] and self._last is not None:
            self._last.wait()
        return self._take(step, state, hold=due[MAIN])

    def _handle(self, number: int, step: int, *, in_memory: bool) -> Handle:
        if in_memory:
            return Handle(self._book, step, Fate(step, "in memory"))
        self._last = self._book.open(number, step)
        return self._last

    def _take(self, step: int, state: Mapping[str, Any], *, hold: bool) -> Taken:
        made = given(state)
        try:
            if self._given is None or self._given.shape != made.shape:
                self._given = None
                bind = self._snapshotter.rebind if self._begun else self._snapshotter.bind
                bind(made.objects, allow_pickle=self._allow_pickle)
                self._given, self._begun = made, True
            for name, value in made.values.items():  # the walk knows the places of the first time
                place = self._given.objects[name]
                place.holder, place.key = value.holder, value.key
            return self._snapshotter.take(step, hold)
        except (TypeError, StateMismatch) as error:
            raise type(error)(in_our_words(str(error))) from error

    def _check_order(self, step: int) -> None:
        if self._inherited is not None and step <= self._inherited:
            raise UsageError(
                f"save({step}): {self.directory} holds checkpoints up to step {self._inherited} of an earlier job, and "
                "nothing was restored from there: a later restore would take those for newer. Call restore() first, or "
                "give another directory."
            )
        if step < self._last_step:
            raise UsageError(
                f"save({step}) after save({self._last_step}): steps go back only after a restore of an earlier one"
            )

    def release(self) -> None:
        """Let go of the objects that were saved last: memory that you let go of, or move elsewhere, is free then.

        For loops that unload a model or its optimizer from a device between saves. It waits for a copy that is under
        way, never for a disk; saves that have begun go on. The next `save` looks its state through as the first did,
        into the buffers that are there. Raises UsageError as `save` does.
        """
        self._check_process("release")
        with self._turn:
            self._check("release")
            self._given = None
            if self._begun:
                self._snapshotter.unbind()

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore(self, state: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> Restored | None:
        """Bring `state` back in place; return what was taken, from where and why, or None where nothing is saved.

        All ranks call it, and take the same: the newest that all can have, of equal steps the nearest (memory, then
        disks). A damaged one is named in `why`, and the next best taken. Random generators come back last: make the
        iterators of loaders before it.

        step: that step, and no other. strict=False: what is not in the saved state, or does not fit, stays as it is and
        is listed (`Restored.missing`).

        Raises CheckpointError where `step` is not there, StateMismatch naming what does not fit, ConfigurationError
        where what is saved is of a world of another size and cannot be taken, UnreachableStorage where the newest
        cannot be read for `grace` seconds (nothing older is taken for it; `step` can): `state` is as it was then.
        """
        self._check_process("restore")
        with self._turn:
            self._check("restore")
            self._doing = "restore"
            try:
                return self._restore(state, step, strict=strict)
            finally:
                self._doing = ""

    def _restore(self, state: Mapping[str, Any], step: int | None, *, strict: bool) -> Restored | None:
        wanted = None if step is None else check_name(step)
        restorer = Restorer(
            self._line, self._snapshotter, self._tiers, self.rank, self.world_size,
            allow_pickle=self._allow_pickle, grace_s=self._settings.grace,
        )  # fmt: skip
        self._given, self._begun = None, False
        restored = restorer.restore(given(state), wanted, strict=strict)
        self._numbers.rewound()
        self._inherited = None
        self._last_step = -1 if restored is None else restored.step
        return restored

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Wait until what was begun is written, and end the keeper. Call it on every rank; twice is once.

        Raises CheckpointError for what has failed and was not told yet, TimeoutError where it is not done after
        `timeout` seconds (None: 600): what is being written goes on without this process, for ten minutes at most.
        """
        if os.getpid() != self._pid:
            return
        with self._turn:
            if self._closed:
                return
            self._check("close")
            self._doing = "close"
            try:
                self._close(timeout)
            finally:
                self._doing = ""

    def _close(self, timeout: float | None) -> None:
        self._closed = "it is closed"
        at_exit.discard(self)
        try:
            self._finish(CLOSE_S if timeout is None else timeout)
        finally:
            self._line.close()
            self._snapshotter.close()
            self._given = None  # what was saved is the caller's alone again (CS-10)
        self._raise_failures()

    def _finish(self, timeout: float) -> None:
        dead = self._line.dead()
        if dead:
            self._book.lost(dead)
            return
        self._line.closing = True
        self._snapshotter.finish()
        try:
            problems = list(self._line.ask({"kind": "ckpt.close"}, timeout)["problems"])
        except CheckpointError as error:
            self._book.lost(str(error))
        except TimeoutError:
            text = f"what was begun is not written {timeout:g} s after close(): it goes on without this process"
            self._book.lost(text)
            raise TimeoutError(
                f"{self.directory}: {text}; another rank that has not closed keeps it open too"
            ) from None
        else:
            self._book.add([in_our_words(text) for text in problems])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:  # what ended the block is what is heard of
            self.close(EXIT_S)
        except (CheckpointError, TimeoutError) as second:
            error.add_note(f"and while closing the Checkpointer of {self.directory}: {second}")

    def at_exit(self) -> str:
        """The interpreter ends, and nobody has closed: finish what was begun. Return what went wrong."""
        if os.getpid() != self._pid:
            return ""
        try:
            self.close(EXIT_S)
        except (CheckpointError, TimeoutError) as error:
            return str(error)
        return ""

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_process(self, what: str) -> None:
        """Before the turn is waited for: in a forked child it may be the parent's for ever."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"{what}() in process {os.getpid()}: this Checkpointer belongs to process {self._pid}, which made it; "
                "make another one here, on another directory"
            )

    def _check(self, what: str) -> None:
        if self._doing:
            raise UsageError(
                f"{what}() in the midst of {self._doing}() on the same thread, as from a signal handler: have it set a "
                f"flag, and call {what}() where the step is done"
            )
        if self._closed:
            raise UsageError(f"{what}(): {self._closed}; make another Checkpointer")

    def _raise_failures(self) -> None:
        failures = self._book.failures()
        if failures:
            raise CheckpointError(in_our_words(f"{self.directory}: " + "; ".join(failures)))

    def _dead(self) -> str:
        return self._line.dead()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._line.send(message)

    def _heard(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """On the line's thread."""
        prefix = str(message["kind"]).partition(".")[0]
        if prefix == "snapshot":
            self._snapshotter.on_message(message, fds)
        elif prefix in self._tiers:
            self._tiers[prefix].on_message(message)

    def _keeper_lost(self, text: str) -> None:
        """On the line's thread."""
        self._book.lost(text)
        self._snapshotter.lost(text)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"rank {self.rank} of {self.world_size}"
        return f"<Checkpointer of {self.directory}: {state}>"
