"""Keeps this rank's state: a snapshot in shared memory after every step, a slower tier where one is due.

Order of a restore (EXPERIMENTS B3): models, optimizers, schedulers and the loader's position first; then the loader's
iterator is made; the random generators last, right before the first step.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from everstep.checkpoint import visible
from everstep.checkpoint.core.layout import Leaf
from everstep.checkpoint.core.plan import MEMORY
from everstep.checkpoint.intent_client import DIRECTORIES, Disks
from everstep.checkpoint.load import State, open_for
from everstep.checkpoint.reading_beside import Beside, Readers
from everstep.checkpoint.snapshot import Recovered, Snapshotter
from everstep.checkpoint.storage.opening import retried
from everstep.checkpoint.unreachable import Retry, deadline_s
from everstep.clock import Clock
from everstep.errors import ConfigurationError, DamagedCheckpoint, StateMismatch, UsageError, WorldTooSmall
from everstep.events import Category, Notice, Restored, SpanClosed, SpanOpened
from everstep.inprocess.assignment import Assignment
from everstep.telemetry import Telemetry, say
from everstep.training.exact import rebuilt_in_another_order
from everstep.training.loop import Epochs
from everstep.training.parts import Asked

LOADER = "loader"
EPOCHS = "epochs"


class CannotBeKept(UsageError):
    """What the script trains with has no state that a restart could begin from."""


class Keeper:
    """One generation's keeper; implements `training.parts.Keeper`."""

    def __init__(
        self,
        assignment: Assignment,
        snapshotter: Snapshotter,
        disks: Disks,
        telemetry: Telemetry,
        clock: Clock,
        readers: Readers | None = None,
    ) -> None:
        """`readers`: who has directories read; left out: nobody reads any."""
        self._snapshotter, self._disks, self._telemetry, self._clock = snapshotter, disks, telemetry, clock
        self._readers = readers
        self._beside: Beside | None = None
        self.reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Entered while a directory is read: each of these waits has a limit of its own."""
        self._rank, self._world_size = assignment.rank, assignment.world_size
        self._generation = assignment.generation
        self._told_of = {name: assignment.companions[name] for name in DIRECTORIES if name in assignment.companions}
        self._saved: State | None = None
        self._resettle: int | None = None  # the step that a world of another size had saved
        self.epochs = Epochs()

    @property
    def _told(self) -> Mapping[str, Any]:
        """What this rank begins from; where there are several nodes it may come with the buffers only."""
        return self._snapshotter.instructions

    def open(self, state: Mapping[str, Any], loader: Any, asked: Asked) -> None:
        """See `parts.Keeper.open`."""
        self._check_disks(asked)
        warning = rebuilt_in_another_order(state, self._world_size)
        if warning and self._rank == 0 and self._generation == 0:
            say(warning)
        kept = dict(state)
        if loader is not None:
            for name in (LOADER, EPOCHS):
                if name in kept:
                    raise UsageError(f"run.steps({name}=…): the name {name!r} is taken by the loader; choose another.")
            if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
                raise CannotBeKept(
                    f"the loader, a {type(loader).__qualname__}, has no state_dict and load_state_dict: its position "
                    "cannot be kept, and a restart would repeat or skip data. Use torchdata's StatefulDataLoader, or "
                    "everstep.training.Positioned around a sequence."
                )
            kept |= {LOADER: loader, EPOCHS: self.epochs}
        try:
            self._snapshotter.bind(kept, allow_pickle=asked.allow_pickle)
        except TypeError as error:  # it names the key; a restart would meet it again
            raise CannotBeKept(str(error)) from error

    def _check_disks(self, asked: Asked) -> None:
        """The agent holds its directories from the start on: what the script asks for must be what it was told."""
        main, local = (self._told_of.get(name, {}) for name in DIRECTORIES)
        for what, wanted, flag in (
            ("checkpoint_dir", asked.checkpoint_dir, main.get("given", main.get("directory"))),
            ("checkpoint_interval", asked.checkpoint_interval, main.get("interval")),
            ("checkpoint_local_dir", asked.checkpoint_local_dir, local.get("given", local.get("directory"))),
            ("checkpoint_local_interval", asked.checkpoint_local_interval, local.get("interval")),
        ):
            if wanted is not None and wanted != flag:
                name = what.replace("_", "-")
                raise ConfigurationError(
                    f"run.steps({what}={wanted!r}), but the agent was told {flag!r}. It opens the directory before the "
                    f"first rank starts: give --{name} to `everstep run`, or set EVERSTEP_{what.upper()}."
                )

    def restore(self, total: int) -> int:
        """See `parts.Keeper.restore`."""
        source = self._told.get("restore")
        if source is None and self._told.get("unfit"):
            raise WorldTooSmall(
                f"{self._world_size} ranks are left, and {self._told['unfit']}, not all of whose parts can be had. "
                f"{self._mend()}"
            )
        if source is None:
            self._check_that_nothing_is_lost()
            self._snapshotter.take(0)  # so that a fault in the first step begins from these very weights
            return 0
        began = self._clock.now()
        self._telemetry.emit(SpanOpened(category=Category.RESTORE.value))
        try:
            recovered = self._snapshotter.restore() or self._from_disk(source)
        except StateMismatch as error:
            self._too_small(source, error)
            raise
        self._resettle = recovered.step if self._saved_by(source) != self._world_size else None
        seconds, step = self._clock.now() - began, recovered.step
        self._telemetry.emit(
            Restored(step=step, tier=recovered.tier, bytes=recovered.bytes, seconds=seconds, why=recovered.why)
        )
        self._telemetry.emit(SpanClosed(category=Category.RESTORE.value))
        if self._rank == 0 and recovered.tier == source["tier"] != MEMORY:
            self._disks.restored(recovered.tier, step, total)
        return step

    def _check_that_nothing_is_lost(self) -> None:
        """Where all that was saved has proved damaged, a person decides: to begin at step 1 again is not for us."""
        for told in self._told_of.values():
            if told.get("lost"):
                raise ConfigurationError(str(told["lost"]))

    def _from_disk(self, source: Mapping[str, Any]) -> Recovered:
        """From a directory, by way of another process. UnreachableStorage: it cannot be read now, and the job ends."""
        try:
            with self.reading():
                saved = self._saved = self._opened(source)
                saved.prepare()
            return self._snapshotter.restore_from(
                int(source["step"]), source["tier"], saved.layout, self._bytes_of, saved.refused
            )
        except BaseException as error:
            if isinstance(error, DamagedCheckpoint):
                self._disks.damaged(source["tier"], int(source["step"]), str(error))
            self.let_go()
            raise

    def _opened(self, source: Mapping[str, Any]) -> State:
        assert self._readers is not None, "a plan from a directory comes with an agent"
        beside = self._beside = self._readers.ask(source["tier"])
        through = retried(beside, Retry(deadline_s(), clock=self._clock))
        if source.get("shared"):
            visible.wait(source["path"], clock=self._clock, look=visible.seen_through(through))
        return open_for(source["path"], self._snapshotter.bound, through)

    def _bytes_of(self, leaf: Leaf) -> memoryview:
        assert self._saved is not None
        with self.reading():
            return self._saved.bytes_of(leaf)

    def let_go(self) -> None:
        """Nothing is read any more; twice does no harm."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.close()
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.close()

    def _saved_by(self, source: Mapping[str, Any]) -> int:
        """The size of the world whose state this is."""
        return int(source.get("saved_by") or self._world_size)

    def _too_small(self, source: Mapping[str, Any], error: StateMismatch) -> None:
        """A world that has lost ranks may have state that only all of them can take up: a new start with all can."""
        saved_by = self._saved_by(source)
        if self._generation and self._world_size < saved_by:
            raise WorldTooSmall(
                f"{self._world_size} ranks are left, and the state of step {source['step']}, which {saved_by} ranks "
                f"kept, cannot be taken up by them: {error} {self._mend()}"
            ) from error

    def _mend(self) -> str:
        if not self._told_of:
            return "Nothing was written to disk: --checkpoint-dir writes what a job can go on from."
        return "Start the job again with all of them: it goes on from its newest checkpoint (docs/checkpoints.md)."

    def restore_randomness(self) -> None:
        """See `parts.Keeper.restore_randomness`. What another world saved is sealed in this one's form at once."""
        self._snapshotter.restore_generators()
        self.let_go()
        step, self._resettle = self._resettle, None
        if step is not None:
            self._snapshotter.resettle(step)

    def take(self, step: int) -> int:
        """See `parts.Keeper.take`."""
        for text in self._disks.problems():  # a save that failed is told at the next step, on every rank (CS-37)
            self._telemetry.emit(Notice(text=text, level="error"))
        due = self._disks.due(step)
        taken = self._snapshotter.take(step, hold=due)
        if due:
            self._disks.staged(taken.buffer, self._snapshotter.holds(taken))
        return taken.bytes

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """See `parts.Keeper.measured`: rank 0's count, and only what retention asks for."""
        for name, told in self._told_of.items():
            metric = told.get("metric")
            if self._rank == 0 and metric and metric in values:
                self._disks.measured(name, step, {metric: values[metric]})

    def finish(self, step: int) -> None:
        """See `parts.Keeper.finish`: the agent saves the last step from memory when all have completed."""


class Positioned:
    """A sequence as a loader that knows its position: `run.steps(n, Positioned(batches))`."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < len(self._items):
            self._next += 1
            yield self._items[self._next - 1]
        self._next = 0

    def __len__(self) -> int:
        return len(self._items)

    def state_dict(self) -> dict[str, int]:
        """The position in the present pass."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position that was saved."""
        self._next = int(state["next"])
