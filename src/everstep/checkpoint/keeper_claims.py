"""The keeper's side of its directories: a holder for each, had one after the other, and none waited for without end.

Rule 1: the keeper makes no call to a directory: `sole_holder` does, in a process of its own.
Rule 2: the first directory is the main one; another belongs to the same training, or is refused (series.py).
Rule 3: one that has said nothing for the grace time is stuck: refused, with its name.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.core.findings import Findings
from everstep.checkpoint.series import MAKE, strangers
from everstep.checkpoint.sole_holder import ENTRY
from everstep.checkpoint.storage import opening
from everstep.checkpoint.unreachable import deadline_s
from everstep.errors import ExitCode
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Message

LOOK_S = 0.5
Spawn = Callable[[str, str, Mapping[str, Any], Any], Child]


class KeeperHold:
    """One directory; implements `holder.Hold` for a tier that begins when it is had."""

    def __init__(self, directory: str) -> None:
        self.directory, self.job, self.lock = opening.place_of(directory), secrets.token_hex(4), ""
        self.findings: Findings | None = None
        self.child: Child | None = None
        self.over = True

    def open(self, run: str, series: str | None = None) -> Findings:
        """See `Hold.open`: it was had before."""
        del run, series
        assert self.findings is not None, "the tier has begun before its directory was had"
        return self.findings

    def go_on(self, job: str, run: str) -> None:
        """See `Hold.go_on`: nobody takes over from the keeper that has the directory."""

    def close(self) -> None:
        """See `Hold.close`: its holder's end gives it up."""


class Claims:
    """All directories of one keeper. `had` is called when it has all, `refused` with a text and a code."""

    def __init__(
        self,
        loop: Loop,
        spawn: Spawn,
        holds: Sequence[KeeperHold],
        grace_s: float,
        tell: Callable[[Message], None],
    ) -> None:
        self._loop, self._spawn, self._holds, self._tell = loop, spawn, holds, tell
        self._grace_s = grace_s
        self._heard_s = 0.0
        self._open: KeeperHold | None = None
        self._had: Callable[[], None] = lambda: None
        self._refused: Callable[[str, int], None] = lambda text, code: None
        self._series = MAKE  # of the first directory
        self.problem = ""  # a holder that is gone

    def take(self, who: str, wait_s: float, had: Callable[[], None], refused: Callable[[str, int], None]) -> None:
        """Have them."""
        self._who, self._wait_s, self._had, self._refused = who, wait_s, had, refused
        self._next()

    def ending(self) -> None:
        """The ranks have ended."""
        for hold in self._holds:
            if hold.child is not None:
                hold.child.send({"kind": "ending"})

    def _next(self) -> None:
        hold = next((one for one in self._holds if one.findings is None), None)
        self._open = hold
        if hold is None:
            self._had()
            return
        words = {
            "directory": hold.directory, "job": hold.job, "who": self._who, "wait_s": self._wait_s,
            "grace_s": self._grace_s,
            "series": self._series if len(self._holds) > 1 else None,
        }  # fmt: skip
        hold.child = self._spawn("holder", ENTRY, words, self)
        self._heard_s = self._loop.clock.now()
        self._loop.later(LOOK_S, self._look)

    def _silent_s(self, hold: KeeperHold) -> float:
        """One call of a store that does not answer is told by its own name."""
        return self._grace_s + (deadline_s() if opening.is_url(hold.directory) else 0.0)

    def _look(self) -> None:
        hold = self._open
        if hold is None:
            return
        if self._loop.clock.now() - self._heard_s < self._silent_s(hold):
            self._loop.later(LOOK_S, self._look)
            return
        text = (
            f"the checkpoint directory {hold.directory} does not answer: nothing has come back from it for "
            f"{self._silent_s(hold):g} s. Its storage is stuck, or gone: see whether `ls` of it returns, mend the "
            "mount, and start again; or give another directory."
        )
        self._refuse(text, int(ExitCode.BAD_NODE))

    def _refuse(self, text: str, code: int) -> None:
        self._open = None
        self._refused(text, code)

    # what the holders say

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""
        del fds
        hold = self._open
        if hold is None or child is not hold.child:
            return
        self._heard_s = self._loop.clock.now()
        match message["kind"]:
            case "waiting":
                self._tell({"kind": "ckpt.waiting", "text": str(message["text"])})
            case "stock":
                hold.lock = str(message["lock"])
                self._stock(hold, Findings.from_json(json.dumps(message["findings"]).encode()))
            case "refused":
                self._refuse(str(message["text"]), int(message["code"]))
            case _:
                return

    def _stock(self, hold: KeeperHold, findings: Findings) -> None:
        if self._series not in (MAKE, findings.series):
            text = strangers(hold.directory, self._holds[0].directory)
            self._refuse(f"{text}.", int(ExitCode.CONFIGURATION))
            return
        self._series, hold.findings = findings.series, findings
        self._next()

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`. A claim that is gone is told; writers hold a share of it."""
        hold = next((one for one in self._holds if one.child is child), None)
        if hold is None:
            return
        text = (
            f"the process that held the checkpoint directory {hold.directory} ended by itself (status {status}): "
            "it was killed, or ran out of memory"
        )
        if hold is self._open:
            self._refuse(text, int(ExitCode.FAILED))
        else:
            self.problem = text
