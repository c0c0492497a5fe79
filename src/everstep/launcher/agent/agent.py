"""The driver: feeds the world machine with what happens on this node, and does what it commands.

Rule 1: nothing is decided here; `recovery.core.world` decides, `recovery.core.policy` says when it is enough.
Rule 2: one thread, nothing blocks; whatever waits is a timer or a descriptor of the loop.
Rule 3: features ride along as companions, known by their prefix alone.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.clock import Clock
from everstep.errors import EverstepError, ExitCode
from everstep.events import FaultNoticed, GenerationStarted, Notice, RunEnded
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.loop import Loop
from everstep.launcher.agent.nursery import Nursery, Process
from everstep.launcher.agent.watch import INTERVAL_S, Watch, probe
from everstep.launcher.agent.worker import Worker
from everstep.launcher.config import LaunchConfig
from everstep.launcher.core import limits
from everstep.recovery.api import Companion
from everstep.recovery.core import words, world
from everstep.telemetry import Telemetry, say

NODE = "node-0"
MOST_FALSE_STARTS = 3
STORE_ENTRY = "everstep.store.host:main"


class Agent:
    """One node's agent, from the first fork to the exit code."""

    def __init__(
        self,
        config: LaunchConfig,
        loop: Loop,
        nursery: Nursery,
        telemetry: Telemetry,
        run_dir: Path,
        companions: Sequence[Companion],
    ) -> None:
        self.config, self.loop, self.nursery, self.telemetry = config, loop, nursery, telemetry
        self.run_dir = run_dir
        self.clock: Clock = loop.clock
        log_root = Path(config.log_dir) if config.log_dir else run_dir / "logs"
        self.crew = Crew(config, nursery, log_root, self._heard, self._gone, self.clock)
        self.host = AgentHost(self, companions)
        self.watch = Watch(limits.Own(config.soft_timeout_s, config.hard_timeout_s))
        self.world = world.begin(NODE, words.Policy(world_size=config.nproc, max_restarts=config.max_restarts))
        self.roster: words.Roster | None = None
        self.ending: words.End | None = None
        self._store: tuple[str, int] | None = None
        self._store_process: Process | None = None
        self._false_starts = 0
        self._waiting_roster: words.Roster | None = None
        self._draining: int | None = None
        self._due: float | None = None
        self._inbox: deque[words.Event] = deque()
        self._orders: dict[type, Callable[[Any], None]] = {
            words.Spawn: lambda command: self.crew.spawn(command.count),
            words.Stop: self._stop,
            words.Kill: self._kill,
            words.Report: lambda command: self._report(command.fault),
            words.Publish: lambda command: self.tell(words.Published(command.roster)),
            words.Enter: lambda command: self._enter(command.roster),
            words.Drain: self._drain,
            words.Finish: lambda command: self._finish(command.generation),
            words.End: self._end,
        }

    # -- the world -----------------------------------------------------------------------------------------------

    def tell(self, event: words.Event) -> None:
        """Hand one event to the world machine, and do what it commands. What follows meanwhile waits its turn."""
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        while self._inbox:
            if self.ending is None:
                self.world, commands = world.step(self.world, self._inbox[0], self.clock.now())
                for command in commands:
                    self._orders[type(command)](command)
            self._inbox.popleft()
        due = world.wake_at(self.world)
        if due is not None and self.ending is None and due != self._due:
            self._due = due
            self.loop.later(max(0.0, due - self.clock.now()) + 0.001, lambda: self.tell(words.Ticked()))

    def run(self) -> int:
        """Serve until everything has ended; return the exit code."""
        self.loop.hear((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD), self._signalled)
        try:
            self.host.start()
            self._start_store()
            self.tell(words.Ticked())
            self.crew.keep_warm(self.config.nproc + self.config.spares)
            self._tick()
            self.loop.run()
        except EverstepError as error:
            self._end(words.End(int(error.exit_code), str(error)))
            self.loop.run()
        return self._close()

    def _tick(self) -> None:
        now = self.clock.now()
        self.nursery.reap()
        if self.ending is None:
            self._look(now)
        self.host.tick(now)
        self.crew.show()
        self.loop.later(INTERVAL_S, self._tick)

    def _look(self, now: float) -> None:
        if self.world.phase is not world.Phase.RUNNING or not self.config.wrapped:
            return
        watched = {r: w for r, w in self.crew.ranks.items() if not w.done and w.last is None}
        for verdict in self.watch.look(watched, now):
            worker = watched[verdict.rank]
            if verdict.action == "probe":
                probe(worker, now, lambda w: w.process.send({"kind": "world.probe"}))
                continue
            self.watch.learned = self.watch.learned.hung(worker.look().step)
            if verdict.action == "kill":
                worker.stack = verdict.reason
                self.tell(words.Wedged(worker.incarnation, verdict.reason, self.crew.step()))
            else:
                self._fault(worker, "stall", "page", f"{verdict.reason}\n{worker.stack}".rstrip())

    def _fault(self, worker: Worker, kind: str, noticed_by: str, text: str, generation: int | None = None) -> None:
        if generation is None:
            generation = self.roster.generation if self.roster is not None else 0
        fault = words.Fault(
            generation=generation, kind=kind, noticed_by=noticed_by, incarnation=worker.incarnation, rank=worker.rank,
            step=self.crew.step(), text=text,
        )  # fmt: skip
        self.tell(words.Faulted(fault))

    # -- what workers say ----------------------------------------------------------------------------------------

    def _heard(self, worker: Worker, kind: str, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        prefix, _, verb = kind.partition(".")
        if prefix != "world":
            self.host.message(worker, prefix, message, fds)
            return
        for fd in fds:
            os.close(fd)
        handler = getattr(self, f"_on_{verb}", None)
        if handler is not None:
            handler(worker, message)

    def _on_hello(self, worker: Worker, message: Mapping[str, Any]) -> None:
        del message
        self.tell(words.Announced(worker.incarnation, worker.facts(NODE, fresh=True)))

    def _on_attached(self, worker: Worker, message: Mapping[str, Any]) -> None:
        del message
        worker.attached = True

    def _on_fault(self, worker: Worker, message: Mapping[str, Any]) -> None:
        self._fault(worker, message["fault"], "worker", message["text"], message["generation"])

    def _on_arrived(self, worker: Worker, message: Mapping[str, Any]) -> None:
        worker.done = False
        facts = worker.facts(NODE, fresh=False, dirt=tuple(message["dirt"]))
        self.tell(words.Arrived(message["generation"], worker.incarnation, facts))

    def _on_completed(self, worker: Worker, message: Mapping[str, Any]) -> None:
        worker.done = True
        self.tell(words.Completed(message["generation"], worker.incarnation))

    def _on_heard(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """An answer to a probe: it hears us, and this is where it stands."""
        worker.probe_sent, worker.waiting, worker.stack = None, bool(message["waiting"]), str(message["stack"])

    def _on_replace(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """The worker itself says that it is not fit to go on (a swallowed interrupt, a thread that will not end)."""
        self.tell(words.Wedged(worker.incarnation, str(message["text"]), self.crew.step()))

    def _on_asked(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """The wrapped function itself asked for the end."""
        text = f"rank {worker.rank}: {message['text']}, code {message['code']}"
        self.tell(words.EndRequested(int(ExitCode.FAILED), text))

    def _on_refused(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """What the script asked for cannot be done here; a restart would meet the same."""
        self.tell(words.EndRequested(int(message["code"]), f"rank {worker.rank}: {message['text']}"))

    def _on_script_failed(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Its traceback stands on the console; a script that cannot even begin is not begun again."""
        hopeless = message["hopeless"] and worker.attempt == 0
        self._fault(worker, "script" if hopeless else "exception", "worker", str(message["text"]))

    def _gone(self, worker: Worker, status: int) -> None:
        if worker.begun and not worker.attached and status == 0 and self.roster is not None:
            worker.done = True
            self._flag_early_exit(worker)
            self.tell(words.Completed(self.roster.generation, worker.incarnation))
        stage = self.world.stage_of(worker.incarnation)
        self.tell(words.Died(worker.incarnation, status, stage, self.crew.step()))
        if self.ending is not None:
            self._maybe_over()

    def _flag_early_exit(self, worker: Worker) -> None:
        others = [w for w in self.crew.ranks.values() if w is not worker and not w.done]
        if others and self.config.wrapped:
            text = f"rank {worker.rank} has ended with 0 before it came to a wrapped call, while others run"
            self.notice(text, "warning")

    # -- generations ---------------------------------------------------------------------------------------------

    def _stop(self, command: words.Stop) -> None:
        worker = self.crew.who(command.incarnation)
        if worker is None:
            return
        if self.config.wrapped:
            worker.process.send({"kind": "world.stop", "generation": command.generation})
        else:  # it would not hear us: all workers of an unwrapped script begin anew
            worker.process.expected_end = True
            worker.process.kill()

    def _kill(self, command: words.Kill) -> None:
        worker = self.crew.who(command.incarnation)
        if worker is not None:
            self.notice(f"{worker.process.name} (pid {worker.process.pid}) is killed: {command.reason}")
            worker.process.kill()

    def _report(self, fault: words.Fault) -> None:
        worker = self.crew.ranks.get(fault.rank) if fault.rank is not None else None
        mark = worker.look().mark_s if worker is not None else None
        text, _, stack = fault.text.partition("\n")
        self.telemetry.emit(
            FaultNoticed(
                number=fault.generation, kind=fault.kind, noticed_by=fault.noticed_by, injured_rank=fault.rank,
                injured_slot=fault.rank, step=fault.step, text=text, last_mark_s=mark, stack=stack,
            )
        )  # fmt: skip

    def _enter(self, roster: words.Roster) -> None:
        before = self.roster
        if before is not None and self._waiting_roster is None:
            self.host.stopped(before.generation)
            if not self.config.wrapped:
                self._renew_store(roster)  # torch's own rendezvous wants a new store for every start (E12)
                return
        if self._store is None:
            self._waiting_roster = roster
            return
        self._waiting_roster = None
        self.roster = roster
        newcomers = self.crew.seat(roster)
        told = self.host.roster(roster)
        for rank, worker in self.crew.ranks.items():
            assigned = {
                "generation": roster.generation, "epoch": roster.epoch, "rank": rank, "world_size": roster.world_size,
                "store": list(self._store), "wrapped": self.config.wrapped, "companions": told.get(rank, {}),
            }  # fmt: skip
            if rank in newcomers:
                self.crew.begin(worker, assigned, self._store, roster.generation)
            else:
                worker.process.send({"kind": "world.assigned", **assigned})
        self.host.release()
        self._record(roster, told)
        self.crew.keep_warm(self.config.spares)

    def _record(self, roster: words.Roster, told: Mapping[int, Mapping[str, Any]]) -> None:
        restore = (told.get(0, {}).get("snapshot") or {}).get("restore") or {}
        self.telemetry.emit(
            GenerationStarted(
                epoch=roster.epoch, number=roster.generation, world_size=roster.world_size,
                members=tuple((m.rank, m.rank, m.incarnation.pid, m.why) for m in roster.members),
                restore_step=restore.get("step"), restored_from=restore.get("tier"), reason=roster.reason,
            )
        )  # fmt: skip

    def recheck(self) -> None:
        """Go on from draining when nothing intended is outstanding."""
        if self._draining is not None and self.host.drained(completed=True):
            generation, self._draining = self._draining, None
            self.tell(words.Drained(generation))

    def _drain(self, command: words.Drain) -> None:
        self._draining = command.generation
        self.recheck()

    def _finish(self, generation: int) -> None:
        for worker in self.crew.ranks.values():
            worker.process.expected_end = True
            worker.process.send({"kind": "world.finish", "generation": generation})
        self.crew.let_spares_go()

    # -- store ---------------------------------------------------------------------------------------------------

    def _start_store(self) -> None:
        self._store = None
        arguments = {"port": self.config.master_port or 0, "host": "127.0.0.1"}
        order = {"role": "helper", "entry": STORE_ENTRY, "arguments": arguments}
        self._store_process = self.nursery.order("store", order, self._store_said, self._store_gone)

    def _renew_store(self, roster: words.Roster) -> None:
        self._store, self._waiting_roster = None, roster
        if self._store_process is not None:
            self._store_process.expected_end = True
            self._store_process.kill()  # its end starts the next one, on the same port where one was given

    def _store_said(self, process: Process, message: dict[str, Any], fds: list[int]) -> None:
        del process, fds
        if message["kind"] == "store.ready":
            self._store = (str(message["host"]), int(message["port"]))
            self._false_starts = 0
            if self._waiting_roster is not None:
                self._enter(self._waiting_roster)
        elif message["kind"] == "store.failed":
            self._end(words.End(int(ExitCode.CONFIGURATION), str(message["text"])))

    def _store_gone(self, process: Process, status: int) -> None:
        del status
        if self.ending is not None or process is not self._store_process:
            return
        if self._store is None and not process.expected_end:
            self._false_starts += 1
            if self._false_starts == MOST_FALSE_STARTS:
                text = f"the store's process ended {MOST_FALSE_STARTS} times before it could serve; see what it printed"
                self._end(words.End(int(ExitCode.CONFIGURATION), text))
                return
        elif not process.expected_end:
            self.notice("the store has gone; running groups need none, the next generation gets a new one", "warning")
        self._start_store()

    # -- the end -------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self.nursery.reap()
            return
        name = signal.Signals(number).name
        for worker in self.crew:
            if worker.begun:
                worker.process.signal(signal.SIGCONT)
                worker.process.signal(number)
        self.tell(words.EndRequested(ExitCode.SIGNALLED + number, f"ended by {name} from outside"))

    def _end(self, command: words.End) -> None:
        if self.ending is not None:
            return
        self.ending = command
        for worker in self.crew:
            worker.process.expected_end = True
            if not worker.begun or command.code < ExitCode.SIGNALLED:
                worker.process.kill()
        if command.code != 0:
            say(command.reason)
        self.loop.later(self.config.grace_s, self._kill_all)
        self._maybe_over()

    def _kill_all(self) -> None:
        for worker in self.crew:
            worker.process.kill()

    def _maybe_over(self) -> None:
        if not list(self.crew):
            self.loop.stop()

    def _close(self) -> int:
        assert self.ending is not None
        code, reason = self.ending.code, self.ending.reason
        for text in self.host.problems():
            self.notice(text, "error")
            if code == 0:
                code, reason = int(ExitCode.FAILED), text
        self.host.close()
        for process in list(self.nursery.processes.values()):
            process.expected_end = True
            process.kill()
        self.telemetry.emit(RunEnded(code=code, reason=reason))
        return code

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger; the display, a sink of it, shows it."""
        self.telemetry.emit(Notice(text=text, level=level))
