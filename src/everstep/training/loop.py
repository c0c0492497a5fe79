"""The loop of steps: where state is restored and taken, faults are let in, and the ledger learns what was done.

Order at a boundary, after step k: its values are read; the snapshot of k is taken; its ledger lines are written, in one
call, also where the snapshot failed; the page says k; a job that is asked to end does so here; the faults planned
between steps come; the next batch is fetched; k+1 begins. Whoever dies before the snapshot is sealed does k again,
whoever dies after it goes on with k+1.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from everstep.clock import Clock
from everstep.events import Category, Event, SpanClosed, SpanOpened, StepDone
from everstep.process.page import Phase
from everstep.training.parts import Asked, Parts

SHOWN_EVERY_S = 0.25
_WORTH_A_SPAN_S = 0.0005


class Steps:
    """One generation's loop on one rank."""

    def __init__(
        self,
        parts: Parts,
        total: int,
        loader: Iterable[Any] | None,
        state: Mapping[str, Any],
        take_logged: Callable[[], dict[str, Any]],
    ) -> None:
        self._parts, self._total, self._loader = parts, total, loader
        self._state = dict(state)
        self._take_logged = take_logged
        self._clock: Clock = parts.clock
        self._late: tuple[int, float, dict[str, Any]] | None = None  # a step whose device values are not read yet
        self._shown_s = 0.0

    def iterate(self, asked: Asked) -> Generator[Any]:
        """Restore, then yield step after step."""
        parts = self._parts
        parts.close_setup()
        parts.keeper.open(self._state, self._loader, asked)
        done = parts.keeper.restore(self._total)
        batches = _Batches(self._loader, parts.keeper.epochs) if self._loader is not None else None
        parts.keeper.restore_randomness()
        faults = parts.arm_faults(self._total, self._state)
        parts.page_resumed(done)
        if parts.rank == 0:
            parts.show_begun(done, self._total)
        try:
            with parts.shielded():
                for step in range(done + 1, self._total + 1):
                    parts.before_step(step)
                    faults.at_boundary(step)
                    if batches is None:
                        yield from self._one(step, step)
                    else:
                        yield from self._one(step, (step, self._fetch(batches)))
        finally:
            faults.detach()
            self._write_late()
            parts.enter_phase(Phase.AFTER)  # also after a `break`: what comes then is no step
        parts.keeper.finish(self._total)

    def _one(self, step: int, given: Any) -> Generator[Any]:
        began = self._clock.now()
        yield given
        ended = after = self._clock.now()
        done = self._done(step, ended - began)
        try:
            size = self._parts.keeper.take(step)
            after = self._clock.now()
            if size:
                done = replace(done, snapshot_bytes=size, snapshot_s=after - ended)
        finally:
            self._parts.emit_all([(done, ended), *_span(Category.SNAPSHOT, ended, after)])
        self._parts.page_step(step)
        self._parts.show_new(step, ended)
        self._show(step, ended - began, after)

    def _fetch(self, batches: "_Batches") -> Any:
        began = self._clock.now()
        batch = batches.next()
        span = _span(Category.DATA_WAIT, began, self._clock.now())
        if span:
            self._parts.emit_all(span)
        return batch

    def _done(self, step: int, seconds: float) -> StepDone:
        """Tell what the step logged: at once on the CPU, one step late where reading would wait for the device."""
        self._write_late()
        values = self._take_logged()
        if any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values.values()):
            self._late = (step, seconds, values)
            return StepDone(step=step, seconds=seconds)
        numbers = {name: float(v) for name, v in values.items()}
        self._parts.last_values = numbers
        self._parts.keeper.measured(step, numbers)
        return StepDone(step=step, seconds=seconds, values=numbers)

    def _write_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            step, seconds, values = late
            numbers = {name: float(v) for name, v in values.items()}
            self._parts.last_values = numbers
            self._parts.keeper.measured(step, numbers)
            self._parts.late(step, seconds, numbers)

    def _show(self, step: int, seconds: float, now: float) -> None:
        if self._parts.rank == 0 and (now - self._shown_s >= SHOWN_EVERY_S or step == self._total):
            self._shown_s = now
            self._parts.show(step, seconds)


def _span(category: Category, began: float, ended: float) -> list[tuple[Event, float | None]]:
    if ended - began < _WORTH_A_SPAN_S:
        return []
    return [(SpanOpened(category=category.value), began), (SpanClosed(category=category.value), ended)]


class _Batches:
    """An endless stream of batches: epochs roll over by themselves; the iterator is made at once (E24)."""

    def __init__(self, loader: Iterable[Any], epochs: "Epochs") -> None:
        self._loader, self._epochs = loader, epochs
        self._set_epoch()
        self._iterator: Iterator[Any] = iter(loader)

    def next(self) -> Any:
        """Return the next batch. Raises RuntimeError when a whole epoch brings none."""
        try:
            return next(self._iterator)
        except StopIteration:
            self._epochs.number += 1
            self._set_epoch()
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise RuntimeError(
                "the loader brought no batch in a whole epoch: its data set is empty on this rank"
            ) from None

    def _set_epoch(self) -> None:
        loader: Any = self._loader
        for holder in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if holder is not None and hasattr(holder, "set_epoch"):
                holder.set_epoch(self._epochs.number)


class Epochs:
    """How many passes over the loader are behind us; part of the state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        """What is saved."""
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take up what was saved."""
        self.number = int(state["number"])
