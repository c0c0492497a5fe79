"""Processes that no limit is kept of: are they still able to run?

Rule 1: only the kernel's evidence counts, and only over several looks of our own: a job that was stopped as a whole and
        continued one process after another goes on without a word.
Rule 2: who has completed hears its agent for as long as its line is open: a question without an answer is a held
        interpreter lock.
Rule 3: a script may do anything for as long as it likes once its wrapped call has returned, but it must do something: a
        process that has used next to no CPU time for `EXIT_S` (or the operator's own hard limit), and has no child that
        might do its work, will not end by itself.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from everstep.launcher.agent.worker import Worker
from everstep.process import kernel
from everstep.process.page import Phase as Doing
from everstep.recovery.core.world import Phase

HELPER_LOOKS = 5
MEMBER_LOOKS = 25
ASK_LOOKS = 25
EXIT_S = 600.0
NEXT_TO_NOTHING = 0.0002
"""Of a core: what it costs to answer a question now and then; a transfer at a few KB/s uses more."""
ANSWERS_S = 0.02
UNDYING_S = 5.0
"""From SIGKILL on: a large process may need a second or two for its memory."""


@dataclass
class Stopped:
    """Counts the looks at which a process was stopped (SIGSTOP), by pid."""

    looks: int
    _counts: dict[int, int] = field(default_factory=dict[int, int])

    def look(self, pids: Iterable[int]) -> list[int]:
        """Return those that were stopped at each of the last looks."""
        states = {pid: kernel.status(pid) for pid in pids if pid}
        stopped = [pid for pid, stat in states.items() if stat is not None and stat.state == "T"]
        self._counts = {pid: self._counts.get(pid, 0) + 1 for pid in stopped}
        return [pid for pid, count in self._counts.items() if count >= self.looks]


@dataclass
class Idle:
    """Notes since when a process has used next to no CPU time, by pid."""

    limit_s: float
    _since: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])  # CPU time, when

    def look(self, pids: Iterable[int], now: float) -> dict[int, float]:
        """Return who has been idle for longer than the limit, with the seconds."""
        found: dict[int, float] = {}
        for pid in pids:
            stat = kernel.status(pid)
            used, since = self._since.get(pid, (-1.0, now))
            allowed = max(ANSWERS_S, NEXT_TO_NOTHING * (now - since))
            if stat is None or used < 0 or stat.cpu_s - used > allowed:
                self._since[pid] = (stat.cpu_s if stat is not None else -1.0, now)
            elif now - since > self.limit_s and not kernel.children_of(pid):
                found[pid] = now - since
        return found


@dataclass
class Deaf:
    """Asks now and then, and counts the looks at which no answer had come, by pid."""

    looks: int
    _counts: dict[int, int] = field(default_factory=dict[int, int])

    def look(self, workers: Iterable[Worker], now: float) -> list[int]:
        """Ask who is to be asked; return those that have not answered at each of the last looks."""
        asked = [w for w in workers if w.attached and w.process.line is not None and not w.process.line.ended]
        self._counts = {w.process.pid: self._counts.get(w.process.pid, 0) + 1 for w in asked}
        for worker in asked:
            if worker.probe_sent is None and self._counts[worker.process.pid] >= ASK_LOOKS:
                worker.probe_sent = now
                self._counts[worker.process.pid] = 0
                worker.process.send({"kind": "world.probe"})
        waiting = [w.process.pid for w in asked if w.probe_sent is not None]
        return [pid for pid in waiting if self._counts[pid] >= self.looks]


@dataclass
class Undying:
    """Notes since when a process that has had SIGKILL is still there, by pid (LA-08)."""

    limit_s: float = UNDYING_S
    _since: dict[int, float] = field(default_factory=dict[int, float])
    told: set[int] = field(default_factory=set[int])

    def look(self, killed: Collection[int], now: float) -> list[int]:
        """Return, once each, those that have been dying for longer than the limit."""
        self._since = {pid: self._since.get(pid, now) for pid in killed}
        self.told &= self._since.keys()
        late = [pid for pid, since in self._since.items() if now - since > self.limit_s and pid not in self.told]
        self.told.update(late)
        return late


class Unwatched:
    """The members that are not watched by their steps: they wait for others, or are on their way out."""

    def __init__(self, exit_s: float) -> None:
        self._stopped, self._deaf, self._idle = Stopped(MEMBER_LOOKS), Deaf(MEMBER_LOOKS), Idle(exit_s)

    def look(self, phase: Phase, crew: Iterable[Worker], now: float) -> list[tuple[Worker, str]]:
        """Return those that will not go on, and how that is known."""
        begun = {w.process.pid: w for w in crew if w.begun and (phase is not Phase.RUNNING or _unlimited(w))}
        found = [(begun[pid], "it is stopped (state T)") for pid in self._stopped.look(begun)]
        deaf = self._deaf.look([w for w in begun.values() if w.done], now)
        found += [(begun[pid], "it does not answer: its interpreter lock is held") for pid in deaf]
        if phase is Phase.FINISHING:
            idle = self._idle.look(begun, now)
            found += [(begun[pid], f"no CPU used for {s:.0f} s since all had completed") for pid, s in idle.items()]
        return found


def _unlimited(worker: Worker) -> bool:
    """Tell whether a member of a running generation has no limit of its own at this moment."""
    return worker.attached and (worker.done or worker.look().phase in (Doing.NONE, Doing.WAITING, Doing.PAUSED))
