"""The workers of this node: those that hold a rank, those that wait for one, those being born."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.clock import Clock
from everstep.launcher.agent import worker as workers
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.process import Process
from everstep.launcher.agent.tails import Shown, Streams, gathered_in, prefix_of, tails_of
from everstep.launcher.agent.worker import Worker
from everstep.launcher.config import LaunchConfig
from everstep.launcher.nodes.core.places import places
from everstep.process import mark
from everstep.process.monitor import PAGE
from everstep.process.page import Page
from everstep.recovery.core import words
from everstep.telemetry import more_room

OnWord = Callable[[Worker, str, Mapping[str, Any], Sequence[int]], None]
"""(worker, kind, message, descriptors): a worker said something."""


class Crew:
    """Starts workers and keeps the books of them."""

    def __init__(
        self,
        config: LaunchConfig,
        nursery: Nursery,
        log_root: Path,
        on_word: OnWord,
        on_gone: Callable[[Worker, int], None],
        clock: Clock,
    ) -> None:
        self._config, self._nursery, self._log_root = config, nursery, log_root
        self._on_word, self._on_gone, self._clock = on_word, on_gone, clock
        self._by_pid: dict[int, Worker] = {}
        self._births: list[Worker] = []
        self.shown = Shown()
        self._next_slot = config.nproc
        self._cwd = os.getcwd()  # now: it may be removed while the job runs
        self._logs_failed = False
        self._prefix = environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        self.error_files: dict[words.Incarnation, str] = {}  # of all that have begun, what torch's `@record` writes
        self._umask = os.umask(0)
        os.umask(self._umask)
        self.ranks: dict[int, Worker] = {}  # of the present roster; the dead stay until the next one
        self.world_size = config.world_size  # of the present roster
        self._members = 0  # of it, those of this node
        self._places: dict[words.Incarnation, int] = {}
        self.group: tuple[int, int] = (0, 1)  # this node's place among those with ranks, and how many these are

    def __iter__(self) -> Iterator[Worker]:
        """All that live or are being born."""
        return iter([*self._by_pid.values(), *self._births])

    def spawn(self, count: int) -> None:
        """Have `count` processes on their way to being announced, those already being born included."""
        for _ in range(max(0, count - sum(1 for w in self._births if not w.process.killed))):
            self._spawn()

    def keep_warm(self, count: int) -> None:
        """Have `count` processes that wait for a rank, those being born included."""
        waiting = sum(1 for w in self if not w.begun and not w.process.killed)
        for _ in range(max(0, count - waiting)):
            self._spawn()

    def _spawn(self) -> None:
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        page_fd = Page.create(str(slot))
        order = {"role": "worker", "slot": slot}
        process = self._nursery.order(f"spare-{slot}", order, self._heard, self._gone, [page_fd], slot)
        worker = Worker(process, page_fd, Page(page_fd), slot)
        process.extra["worker"] = worker
        self._births.append(worker)

    def _heard(self, process: Process, message: dict[str, Any], fds: list[int]) -> None:
        worker: Worker = process.extra["worker"]
        if message["kind"] == "world.hello" and worker in self._births:
            self._births.remove(worker)
            self._by_pid[process.pid] = worker
        self._on_word(worker, str(message["kind"]), message, fds)

    def _gone(self, process: Process, status: int) -> None:
        worker: Worker = process.extra["worker"]
        self._by_pid.pop(process.pid, None)
        if worker in self._births:
            self._births.remove(worker)
        if worker.logs is not None:
            self.shown.ended((worker.logs.stdout, worker.logs.stderr))
        worker.close()
        if process.incarnation is not None:
            self._on_gone(worker, status)

    def who(self, incarnation: words.Incarnation) -> Worker | None:
        """Return the living worker that is `incarnation`."""
        worker = self._by_pid.get(incarnation.pid)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def seat(self, roster: words.Roster, node: str) -> set[int]:
        """Give ranks to the members that live here; return the ranks whose holder has yet to begin the script."""
        here = [member for member in roster.members if member.node == node]
        self._places = places(here, self._places, smaller=roster.world_size < self.world_size)
        self.ranks, self.world_size, self._members = {}, roster.world_size, len(here)
        groups = list(dict.fromkeys(member.node for member in roster.members))
        self.group = (groups.index(node) if here else 0, len(groups))
        newcomers: set[int] = set()
        for member in here:
            worker = self.who(member.incarnation)
            if worker is None:  # dead since; its death makes the next generation
                continue
            worker.rank = worker.slot = worker.process.slot = worker.process.rank = member.rank
            self.ranks[member.rank] = worker
            worker.process.name = f"worker-{member.rank}"
            if not worker.begun:
                newcomers.add(member.rank)
        return newcomers

    def begin(self, worker: Worker, assigned: Mapping[str, Any], store: tuple[str, int], attempt: int) -> None:
        """Have a fresh process become its rank and begin the script."""
        assert worker.rank is not None
        config = self._config
        worker.begun, worker.attempt = True, attempt
        # from here to its first step a wrapped function is watched: set-up has a limit of its own
        (worker.page.enter if config.wrapped else worker.page.began)(attempt, self._clock.now())
        place = self._places[worker.incarnation]
        logs = worker.logs = self._plan_logs(attempt, place)
        environment = workers.environment_of(
            self._nursery.environment, config, self._standing(worker), attempt, store, logs.error_file
        ) | mark.words(self._nursery.job, worker.process.number)
        self.error_files[worker.incarnation] = logs.error_file
        environment[PAGE] = f"/proc/{os.getpid()}/fd/{worker.page_fd}"
        shown = (logs.stdout if logs.tee_stdout else "", logs.stderr if logs.tee_stderr else "")
        prefix = prefix_of(self._prefix, config.role, worker.rank, place)
        self.shown.follow(tails_of(prefix, Streams(shown, (config.stdout_filters, config.stderr_filters))))
        if config.cycle_log is not None:
            whole = f"{config.cycle_log[0]}{attempt}{config.cycle_log[1]}"
            self.shown.follow(gathered_in(whole, f"{worker.rank}: ", (logs.stdout, logs.stderr)))
        here = {"cwd": self._cwd, "umask": self._umask}
        arguments = workers.arguments_of(config, place)
        worker.process.send(workers.begin_message(config, worker, environment, assigned, arguments) | here)

    def local_of(self, rank: int) -> list[int]:
        """Return the place of a rank of ours on this node, and how many places there are."""
        return [self._places[self.ranks[rank].incarnation], self._local_size]

    @property
    def _local_size(self) -> int:
        return max(self._members, max(self._places.values(), default=-1) + 1)

    def _standing(self, worker: Worker) -> workers.Standing:
        assert worker.rank is not None
        place, (group, groups) = self._places[worker.incarnation], self.group
        return workers.Standing(worker.rank, self.world_size, place, self._local_size, group, groups)

    def _plan_logs(self, attempt: int, place: int) -> workers.Logs:
        """Choose a worker's log files; a disk that takes none costs the logs, never the worker (LA-25)."""
        try:
            return workers.plan_logs(self._config, self._log_root, attempt, place)
        except OSError as error:
            if not self._logs_failed:
                self._logs_failed = True
                text = f"no log files under {self._log_root}: {error.strerror}; workers write to the console instead. "
                text = (text + more_room(error)).rstrip(". ")
                self._nursery.notice(text)
            return workers.Logs(self._log_root / "none")

    def step(self) -> int | None:
        """The last step done on all ranks of this node, by their pages; None before the first."""
        steps = [w.look().step for w in self.ranks.values() if w.attached]
        return min(steps) if steps and len(steps) == self._members and min(steps) > 0 else None

    def forget_births(self) -> None:
        """Whoever has not been born by now will not be."""
        for worker in [w for w in self._births if not w.process.pid]:
            self._births.remove(worker)
            worker.close()

    def let_spares_go(self) -> None:
        """No more ranks are given away."""
        for worker in self:
            if not worker.begun:
                worker.process.expected_end = True
                worker.process.send({"kind": "world.end"})
