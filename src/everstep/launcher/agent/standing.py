"""Where the ranks of this node stand: each is asked, and who does not answer is looked at from outside.

    agent ─▶ control.stacks                     to each rank that hears its agent
    agent ◀─ control.stand {waiting, threads}   from its waiter thread, whatever its main thread does

Rule 1: a rank is asked once at a time: a stopped one reads nothing, and what waits for it must not crowd out what its
        agent has to tell it.
Rule 2: nobody is stopped, signalled or judged for it. A rank whose interpreter lock is held, or that is stopped, is
        told of by the kernel's words and, where it is installed, by py-spy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.launcher.agent.spy import Spy
from everstep.launcher.agent.view import Seen, rank_view
from everstep.launcher.agent.worker import Worker
from everstep.process import kernel
from everstep.process.loop import Loop
from everstep.process.threads import heard

ANSWER_S = 2.0
Found = Mapping[str, Any]


@dataclass(eq=False)
class _Asking:
    """One round over the ranks of this node."""

    awaited: dict[int, Worker]
    found: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])


class Standing:
    """Asks the ranks of one agent. All calls come on the agent's one thread."""

    def __init__(self, agent: Seen, loop: Loop) -> None:
        self._agent, self._loop, self._spy = agent, loop, Spy(loop)
        self._asking: _Asking | None = None
        self._waiting: list[Callable[[Found], None]] = []
        self._deaf: set[int] = set()  # pids that have been asked and have not answered yet

    def ask(self, then: Callable[[Found], None]) -> None:
        """Find out where all ranks stand; `then` comes once. Who asks meanwhile hears the same."""
        self._waiting.append(then)
        if self._asking is not None:
            return
        workers = {rank: w for rank, w in self._agent.crew.ranks.items() if w.last is None}
        asking = self._asking = _Asking(dict(workers))
        for rank, worker in workers.items():
            if not self._agent.config.wrapped:  # it does not hear us
                self._from_outside(asking, rank, worker, "")
            elif worker.process.pid not in self._deaf:
                self._deaf.add(worker.process.pid)
                worker.process.send({"kind": "control.stacks"})
        self._loop.later(ANSWER_S, lambda: self._late(asking))
        self._look(asking)

    def answered(self, rank: int, message: Found) -> None:
        """A rank says where it stands."""
        worker = self._agent.crew.ranks[rank]
        self._deaf.discard(worker.process.pid)
        asking = self._asking
        if asking is None or asking.awaited.get(rank) is not worker:
            return
        told = {"by": "itself", "why": "", "waiting": bool(message["waiting"]), "threads": heard(message["threads"])}
        self._take(asking, rank, worker, told)

    def _late(self, asking: _Asking) -> None:
        """Whoever has not answered does not hear us: its interpreter lock is held, or it does not run."""
        if asking is self._asking and self._agent.config.wrapped:
            for rank, worker in list(asking.awaited.items()):
                self._from_outside(asking, rank, worker, f"does not answer ({kernel.place(worker.process.pid)})")

    def _from_outside(self, asking: _Asking, rank: int, worker: Worker, why: str) -> None:
        def seen(threads: list[dict[str, Any]]) -> None:
            more = (
                ""
                if threads
                else "py-spy cannot read it"
                if self._spy.path
                else "py-spy, which could, is not installed"
            )
            text = ", ".join(part for part in (why, more) if part)
            told = {"by": "py-spy" if threads else "", "why": text, "waiting": None, "threads": threads}
            self._take(asking, rank, worker, told)

        self._spy.look(worker.process.pid, seen)

    def _take(self, asking: _Asking, rank: int, worker: Worker, told: dict[str, Any]) -> None:
        if asking.awaited.pop(rank, None) is not None:
            asking.found[rank] = rank_view(self._agent, worker, self._loop.clock.now()) | told
            self._look(asking)

    def _look(self, asking: _Asking) -> None:
        if asking.awaited or asking is not self._asking:
            return
        self._asking = None
        ranks = [asking.found[rank] for rank in sorted(asking.found)]
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then({"node": self._agent.nodes.name, "ranks": ranks})
