"""A rank's side of one directory: offers what is taken, keeps what is wanted, writes down what became of it.

Two threads meet here: the main thread at the end of each `save` (`taken`), and the line's, which hears the keeper.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.given import in_our_words
from everstep.checkpoint.handles import Book
from everstep.checkpoint.snapshot import Snapshotter, Taken
from everstep.errors import CheckpointError

REMEMBERED = 16
"""Snapshots of which it is known where they lie: more than there are buffers."""


class TierClient:
    """`told`: fates are those of the handles; else only what fails is told, under this tier's name."""

    def __init__(
        self, tier: str, send: Callable[[Mapping[str, Any]], None], snapshotter: Snapshotter, book: Book, *, told: bool
    ) -> None:
        self._tier, self._send, self._snapshotter, self._book, self._told = tier, send, snapshotter, book, told
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[int, Taken]] = {}  # number → step, snapshot
        self._newest = 0
        self._wanted: tuple[int, int] | None = None  # ask, number: of a save that has not come yet
        self._parked: tuple[int, int, int] | None = None  # number, buffer, hold: on the chance that it is wanted

    def taken(self, number: int, step: int, taken: Taken, *, due: bool, metrics: Mapping[str, float]) -> None:
        """Save `number` is in a buffer. Main thread."""
        hold = taken.hold if self._told else 0
        offer: dict[str, Any] = {"number": number, "step": step, "buffer": taken.buffer, "due": due, "hold": hold}
        offer |= {"bytes": taken.bytes, "seconds": taken.seconds}
        self._send({"kind": f"{self._tier}.offer", **offer, **({"metrics": metrics} if metrics else {})})
        with self._lock:
            self._taken[number], self._newest = (step, taken), number
            if hold:
                self._parked = number, taken.buffer, hold
            for old in sorted(self._taken)[:-REMEMBERED]:
                del self._taken[old]
            wanted = self._wanted if self._wanted is not None and self._wanted[1] <= number else None
            if wanted is not None:
                self._wanted = None
        if wanted is not None:
            self._keep(*wanted)

    def on_message(self, message: Mapping[str, Any]) -> None:
        """The keeper speaks. On the line's thread."""
        match message["kind"].partition(".")[2]:
            case "want":
                with contextlib.suppress(CheckpointError):
                    self._asked(int(message["ask"]), int(message["number"]))
            case "fate" if self._told:
                text = in_our_words(message["text"])
                self._book.settle(message["number"], message["step"], message["what"], text, alone=message["alone"])
            case "fate" if message["what"] == "failed":
                text = f"{self._tier}: the checkpoint of step {message['step']} was not saved: {message['text']}"
                self._book.add([text])
            case _:
                return

    def _asked(self, ask: int, number: int) -> None:
        with self._lock:
            if number > self._newest:
                self._wanted = ask, number
                return
        self._keep(ask, number)

    def rewound(self) -> None:
        """A restore: what was taken belongs to a line that has ended."""
        with self._lock:
            self._taken.clear()
            self._wanted = self._parked = None

    def damaged(self, step: int, text: str) -> None:
        """A restore could not read the checkpoint of `step`."""
        self._send({"kind": f"{self._tier}.damaged", "step": step, "text": text})

    def _keep(self, ask: int, number: int) -> None:
        with self._lock:
            step, taken = self._taken.get(number, (0, None))
            parked, self._parked = self._parked, None
        if parked is not None and parked[0] != number:
            self._snapshotter.forgo(*parked[1:])  # the keeper gives it up as it hears our answer
        hold = 0 if taken is None else self._snapshotter.keep(taken.buffer, taken.sequence)
        if taken is not None and hold:
            staged = {"ask": ask, "step": step, "buffer": taken.buffer, "hold": hold}
            self._send({"kind": f"{self._tier}.staged", **staged})
        else:
            self._send({"kind": f"{self._tier}.late", "ask": ask})
