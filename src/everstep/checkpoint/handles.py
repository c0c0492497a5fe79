"""What became of a save: a `Handle` for whoever asked for it, and the book in which the fates are written.

One thread writes (`Book.settle`, `Book.lost`), any may read and wait. A handle that nobody holds any more costs
nothing; its failure is told all the same (`Book.failures`).
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from everstep.clock import SYSTEM
from everstep.errors import CheckpointError

What = Literal["committed", "coalesced", "skipped", "not due", "in memory", "failed"]
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one save.

    committed   it is durable, as a checkpoint of its own
    coalesced   it was left out for the newer `into`, which is durable
    skipped     it was left out (`text` says why): nothing of it will be durable
    not due     its step is no multiple of the interval: nothing was copied
    in memory   it is due for memory alone: there it is until three newer ones are
    failed      it could not be made durable: `text` says why; `Handle.wait` raises it
    """

    step: int
    what: What
    into: int | None = None
    text: str = ""

    @property
    def durable_step(self) -> int | None:
        """The step that is durable by this save; None where none is."""
        return self.step if self.what == "committed" else self.into


class Handle:
    """One save. From any thread."""

    def __init__(self, book: "Book", step: int, fate: Fate | None = None) -> None:
        self._book = book
        self._fate = fate
        self.step = step
        """The step that was saved."""

    @property
    def fate(self) -> Fate | None:
        """What became of it, failed too; None while that is not decided. Never waits, never raises."""
        return self._fate

    def done(self) -> bool:
        """True when its fate is decided. Never waits. Raises CheckpointError where the save has failed."""
        fate = self._fate
        if fate is None:
            return False
        self._book.check(fate)
        return True

    def wait(self, timeout: float | None = None) -> Fate:
        """Return its fate as soon as that is decided.

        Raises CheckpointError where it has failed, or where whoever writes it is gone; TimeoutError after `timeout`
        seconds. Without a timeout it waits as long as its write takes, but never for a process that does not live.
        """
        fate = self._book.wait_for(self, timeout)
        self._book.check(fate)
        return fate

    def settle(self, fate: Fate) -> None:
        """It is decided (by the book, once)."""
        self._fate = fate

    def __repr__(self) -> str:
        return f"<Handle of step {self.step}: {self._fate.what if self._fate else 'under way'}>"


class Book:
    """All handles of one Checkpointer. `alive` says why nobody will decide any more, or nothing."""

    def __init__(self, alive: Callable[[], str]) -> None:
        self._alive = alive
        self._changed = threading.Condition()
        self._open: dict[int, weakref.ref[Handle]] = {}
        self._opened = 0  # the last number
        self._early: dict[int, tuple[int, What, str, bool]] = {}  # told before this rank has come to the number
        self._untold: list[str] = []
        self._heard: set[str] = set()  # what was raised: it is told once
        self._lost = ""

    def open(self, number: int, step: int) -> Handle:
        """A save is under way."""
        handle = Handle(self, step)
        with self._changed:
            self._opened = number
            fate = self._early_fate(number, step)
            if self._lost:
                handle.settle(Fate(step, "failed", text=self._lost))
            elif fate is not None:
                handle.settle(fate)
            else:
                self._open[number] = weakref.ref(handle)
        return handle

    def _early_fate(self, number: int, step: int) -> Fate | None:
        """Where another rank was ahead, it may be decided already: this number's own, or that of one that it shares."""
        shared = [at for at, (_, _, _, alone) in sorted(self._early.items()) if at == number or not alone]
        fate = next((_fate_of(step, at == number, *self._early[at][:3]) for at in shared if at >= number), None)
        self._early = {at: told for at, told in self._early.items() if at > number}
        return fate

    def settle(self, number: int, step: int, what: What, text: str, *, alone: bool) -> None:
        """A number has its fate; so have those before it, unless it is its own `alone`."""
        with self._changed:
            for each in [n for n in self._open if n == number or (n < number and not alone)]:
                handle = self._open.pop(each)()
                if handle is not None:
                    handle.settle(_fate_of(handle.step, each == number, step, what, text))
            if number > self._opened:
                self._early[number] = step, what, text, alone
            if what == "failed":
                self._untold.append(f"the checkpoint of step {step} was not saved: {text}")
            self._changed.notify_all()

    def lost(self, text: str) -> None:
        """Whoever decides is gone: nothing that is open will be."""
        with self._changed:
            if self._lost:
                return
            self._lost = text
            if self._open:
                self._untold.append(text)
            for reference in self._open.values():
                handle = reference()
                if handle is not None:
                    handle.settle(Fate(handle.step, "failed", text=text))
            self._open.clear()
            self._changed.notify_all()

    def add(self, problems: list[str]) -> None:
        """Failures that have no handle."""
        with self._changed:
            self._untold += [text for text in problems if text not in self._untold and text not in self._heard]

    def failures(self) -> list[str]:
        """Take what nobody has been told of."""
        with self._changed:
            told, self._untold = self._untold, []
            self._heard.update(told)
            return told

    def check(self, fate: Fate) -> None:
        """Raise where it failed; so it has been told."""
        if fate.what == "failed":
            with self._changed:
                self._heard.update(text for text in self._untold if fate.text in text)
                self._untold = [text for text in self._untold if fate.text not in text]
            raise CheckpointError(f"the checkpoint of step {fate.step} was not saved: {fate.text}")

    def wait_for(self, handle: Handle, timeout: float | None) -> Fate:
        """See `Handle.wait`."""
        deadline = None if timeout is None else SYSTEM.now() + timeout
        while (fate := handle.fate) is None:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - SYSTEM.now())
            if left <= 0:
                raise TimeoutError(f"the checkpoint of step {handle.step} is not decided after {timeout:g} s")
            with self._changed:
                if handle.fate is None:
                    self._changed.wait(left)
            dead = "" if handle.fate is not None else self._alive()
            if dead:
                self.lost(dead)
        return fate


def _fate_of(step: int, own: bool, by: int, what: What, text: str) -> Fate:
    if own:
        return Fate(step, what, text=text)
    if what == "committed":
        return Fate(step, "coalesced", by, f"left out for step {by}")
    if what == "failed":
        return Fate(step, "failed", text=f"left out for step {by}, which was not saved: {text}")
    return Fate(step, what, text=text)
