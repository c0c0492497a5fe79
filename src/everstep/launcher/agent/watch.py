"""Reads the progress pages and /proc at a fixed rate, and asks `core.limits` what it means."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.launcher.agent.worker import Worker
from everstep.launcher.core import limits
from everstep.process import kernel
from everstep.process.page import Phase, Reading

INTERVAL_S = 0.2
_PHASES = {
    Phase.NONE: "none",
    Phase.FIRST: "first",
    Phase.STEP: "step",
    Phase.DECLARED: "declared",
    Phase.PAUSED: "paused",
    Phase.WAITING: "waiting",
}
_JUMP_S = 5.0
"""A gap in our own ticks: the machine slept, or we starved. Suspicions of that time are void (H5)."""


@dataclass
class Watch:
    """The agent's eyes."""

    own: limits.Own
    learned: limits.Learned = field(default_factory=limits.Learned)
    _last: dict[int, Reading] = field(default_factory=dict[int, Reading])
    _looked_s: float = 0.0

    def look(self, workers: Mapping[int, Worker], now: float) -> tuple[limits.Verdict, ...]:
        """One look at every rank of the running generation; returns whom to interrupt or kill. Asks by itself."""
        gap, self._looked_s = now - self._looked_s, now
        views = [self._view(rank, worker, now) for rank, worker in sorted(workers.items())]
        if gap > _JUMP_S:
            for worker in workers.values():
                worker.page.mark(now)
            return ()
        steps = [v.step for v in views]
        if steps:
            self.learned = self.learned.passed(min(steps))
        verdicts = limits.judge(views, self.learned, self.own)
        for verdict in verdicts:
            worker = workers[verdict.rank]
            if verdict.action != "probe":
                self.learned = self.learned.hung(worker.look().step)
            elif worker.probe_sent is None:  # once
                worker.probe_sent = now
                worker.process.send({"kind": "world.probe"})
        return tuple(verdict for verdict in verdicts if verdict.action != "probe")

    def _view(self, rank: int, worker: Worker, now: float) -> limits.View:
        page = worker.look()
        self._learn(rank, page)
        stat = kernel.status(worker.process.pid)
        cpu = stat.cpu_s if stat is not None else 0.0
        if worker.cpu_at_mark[0] != page.mark_s:
            worker.cpu_at_mark = (page.mark_s, cpu)
            worker.probe_sent = worker.waiting = None
        silent = max(0.0, now - page.mark_s)
        return limits.View(
            rank=rank,
            step=page.step,
            silent_s=silent,
            phase=_PHASES.get(page.phase, "none"),
            limit_s=page.limit_s,
            steps_here=page.step - page.from_step,
            state=stat.state if stat is not None else "Z",
            cpu_share=(cpu - worker.cpu_at_mark[1]) / max(silent, 0.1),
            probe_age_s=None if worker.probe_sent is None else now - worker.probe_sent,
            waiting=worker.waiting,
            name=page.name,
        )

    def _learn(self, rank: int, page: Reading) -> None:
        last = self._last.get(rank)
        self._last[rank] = page
        if last is None or last.generation != page.generation or last.mark_s == page.mark_s:
            return
        if last.phase in (Phase.STEP, Phase.FIRST) and page.phase not in (Phase.WAITING, Phase.NONE):
            self.learned = self.learned.gap(page.mark_s - last.mark_s, first=last.phase == Phase.FIRST)
