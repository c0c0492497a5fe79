"""Reads the progress pages and /proc at a fixed rate, and asks `core.limits` what it means."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.events import Event, LimitLearned, Notice
from everstep.launcher.agent.worker import Worker
from everstep.launcher.core import limits
from everstep.launcher.core.learned import Lesson
from everstep.launcher.core.memory import Glance, Memory
from everstep.launcher.glances import glance
from everstep.process import kernel, stacks
from everstep.process.page import SIZE

INTERVAL_S = 0.2
MOST_LESSONS = 1000
_WORTH_TELLING = 1.25
"""A learned limit is told again when it has changed by this factor."""
_TIGHT = 0.5
"""A step that took more than this share of the operator's own limit is worth a warning."""


@dataclass
class Watch:
    """The agent's eyes."""

    own: limits.Own
    deaf: bool = False
    """The script knows nothing of us: its workers answer no question, but a signal makes them write their stacks."""
    memory: Memory = field(default_factory=Memory)
    near: frozenset[int] = frozenset()
    """The ranks that the last look found near their limits."""
    _news: list[Event] = field(default_factory=list[Event])
    _lessons: list[Lesson] = field(default_factory=list[Lesson])
    _told_s: float = 0.0
    _warned_s: float = 0.0
    _places: dict[str, float] = field(default_factory=dict[str, float])

    def look(self, workers: Mapping[int, Worker], now: float) -> tuple[limits.Verdict, ...]:
        """One look at every rank of the running generation; returns whom to interrupt or kill. Asks by itself."""
        views = {view.rank: view for view in self.observe(workers, now)}
        verdicts = limits.judge(tuple(views.values()), self.memory.learned, self.own)
        for verdict in verdicts:
            worker = workers[verdict.rank]
            if verdict.action != "probe":
                self._raise(views[verdict.rank])
            else:
                self.ask(worker, now)
        self._tell()
        return tuple(verdict for verdict in verdicts if verdict.action != "probe")

    def observe(self, workers: Mapping[int, Worker], now: float) -> tuple[limits.View, ...]:
        """One look at the ranks of this node, without a judgement: where there are others, that is for all of them."""
        for worker in workers.values() if self.deaf else ():
            self._hear(worker, now)
        glances = [self._glance(rank, worker) for rank, worker in sorted(workers.items())]
        self.memory = self.memory.look(glances, now)
        for rank, track in self.memory.tracks.items():
            if track.void:
                workers[rank].probe_sent = workers[rank].heard_s = None
        self._lessons = [*self._lessons[-MOST_LESSONS:], *self.memory.lessons]
        views = self.memory.views(now)
        self.near = frozenset(v.rank for v in views if limits.near(v, self.memory.learned, self.own))
        return views

    def ask(self, worker: Worker, now: float) -> None:
        """Ask where it stands and whether it hears us, once in a silence."""
        if worker.probe_sent is not None:
            return
        worker.probe_sent = now
        if not self.deaf:
            worker.process.send({"kind": "world.probe"})
        else:
            worker.dump()

    def _hear(self, worker: Worker, now: float) -> None:
        """What a signal has made it write is its answer."""
        if worker.probe_sent is None or worker.last is not None:
            return
        told = stacks.main_thread(stacks.read(worker.page_fd, SIZE))
        if told:
            worker.probe_sent, worker.heard_s = None, now
            worker.stack, worker.waiting = told, stacks.waits(told)

    def _glance(self, rank: int, worker: Worker) -> Glance:
        pid = worker.speaker if self.deaf else worker.process.pid
        return glance(
            rank, worker.look(), kernel.status(pid), asked_s=worker.probe_sent, heard_s=worker.heard_s,
            waiting=bool(worker.waiting), stack=worker.stack, inside=worker.inside, held=worker.held,
            monitoring=worker.monitoring, deaf=self.deaf,
        )  # fmt: skip

    def generation_of(self, rank: int) -> int:
        """Return the generation that a rank was last seen in."""
        return self.memory.tracks[rank].seen.generation

    def lessons(self) -> list[Lesson]:
        """What looks have taught since this was last asked; nobody need ask where this node judges for itself."""
        lessons, self._lessons = self._lessons, []
        return lessons

    def news(self) -> tuple[Event, ...]:
        """What the ledger should know since this was last asked: limits, and what they were learned from."""
        news, self._news = tuple(self._news), []
        return news

    def _raise(self, view: limits.View) -> None:
        """An alarm is raised: from here on its place has more time."""
        limit = limits.limit_of(view, self.memory.learned, self.own)
        if limit.what:  # of the script's own
            return
        before = limit.limit_s
        self.memory = self.memory.alarmed(view, before)
        after = limits.limit_of(view, self.memory.learned, self.own).limit_s
        if after > before:
            where = view.place or f"the step after {view.step}"
            text = f"{where}: the limit is raised from {before:g} s to {after:g} s, lest what is only slow ends a job"
            self._learned(text, place=view.place, place_s=after)

    def _tell(self) -> None:
        """Say what was learned, when it is first known and when it has changed."""
        learned, own = self.memory.learned, self.own
        for place, known in learned.places.items():
            if known.worst_s > _WORTH_TELLING * self._places.get(place, 0.0):
                self._places[place] = known.worst_s
                limit = limits.PLACE_MULTIPLE * known.worst_s
                text = f"{place or 'an unknown place'}: a silence of {known.worst_s:.1f} s has ended by itself"
                self._learned(text, place=place, place_s=limit)
        if learned.steps < limits.LEARN_STEPS:
            return
        idle_s = limits.idle_limit(learned)
        if not self._told_s or not 1 / _WORTH_TELLING < idle_s / self._told_s < _WORTH_TELLING:
            self._told_s = idle_s
            self._learned(f"learned from {learned.steps} steps: nine of ten took {learned.typical_s:.3f} s at most")
        if own.soft_s is not None and learned.longest_s > _TIGHT * own.soft_s and not self._warned_s:
            self._warned_s = learned.longest_s
            text = f"--soft-timeout {own.soft_s:g}: the longest step so far took {learned.longest_s:.1f} s; "
            self._news.append(
                Notice(text=f"{text}one that takes longer than the limit is interrupted", level="warning")
            )

    def _learned(self, text: str, place: str = "", place_s: float = 0.0) -> None:
        learned = self.memory.learned
        event = LimitLearned(
            text=text, idle_s=self.own.soft_s or limits.idle_limit(learned), step_s=learned.typical_s,
            longest_s=learned.longest_s, steps=learned.steps, place=place, place_s=place_s,
        )  # fmt: skip
        self._news.append(event)
