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
from everstep.events import Notice, RunEnded
from everstep.launcher.agent import ledger
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.ending import Ending
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.loop import Loop
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.stores import Stores
from everstep.launcher.agent.watch import INTERVAL_S, Watch
from everstep.launcher.agent.worker import Worker, well_formed
from everstep.launcher.config import LaunchConfig
from everstep.launcher.core import limits
from everstep.recovery.api import Companion
from everstep.recovery.core import words, world
from everstep.telemetry import Telemetry

NODE = "node-0"
MOST_LOST_SPARES = 8


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
        self.watch = Watch(limits.Own(config.soft_timeout_s, config.hard_timeout_s, config.first_timeout_s))
        self.world = world.begin(NODE, words.Policy(world_size=config.nproc, max_restarts=config.max_restarts))
        self.roster: words.Roster | None = None
        self.ending: Ending | None = None
        self.stores = Stores(loop, nursery, config.master_port or 0, self._store_ready, self._store_failed)
        self._storeless = False
        self._lost_spares = 0
        self._publishing: words.Roster | None = None  # waits for a store
        self._draining: int | None = None
        self._due: float | None = None
        self._inbox: deque[words.Event] = deque()
        self._orders: dict[type, Callable[[Any], None]] = {
            words.Spawn: lambda command: self._spawn(command.count),
            words.Stop: self._stop,
            words.Kill: self._kill,
            words.Report: lambda command: self._report(command.fault),
            words.Publish: lambda command: self._publish(command.roster),
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
        self.nursery.on_barren = self._barren
        try:
            self.host.start()
            self.stores.start()
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
            self.nursery.patrol({w.process.pid for w in self.crew if w.begun})
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
            if verdict.action == "kill" or not worker.attached:  # no function is on its stack that could be left
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
        if well_formed(verb, message):
            getattr(self, f"_on_{verb}")(worker, message)
        else:
            self.notice(
                f"{worker.process.name} said {kind!r} in a form that is unknown here; it is not heard", "warning"
            )

    def _on_hello(self, worker: Worker, message: Mapping[str, Any]) -> None:
        del message
        self.tell(words.Announced(worker.incarnation, worker.facts(NODE, fresh=True)))

    def _on_left(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """It is on its way out; its death says the rest."""

    def _on_attached(self, worker: Worker, message: Mapping[str, Any]) -> None:
        del message
        worker.attached = True
        worker.lasting = frozenset(self.nursery.strays_of(worker.process))

    def _on_fault(self, worker: Worker, message: Mapping[str, Any]) -> None:
        self.stores.suspect(message["text"])
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
            self.ending.look()

    def _flag_early_exit(self, worker: Worker) -> None:
        others = [w for w in self.crew.ranks.values() if w is not worker and not w.done]
        if others and self.config.wrapped:
            text = f"rank {worker.rank} has ended with 0 before it came to a wrapped call, while others run"
            self.notice(text, "warning")

        elif not worker.begun and self.world.phase is world.Phase.RUNNING:
            self._replenish(expected=worker.process.expected_end)

    def _replenish(self, *, expected: bool) -> None:
        """A spare has died: make another, unless they die as fast as they are made."""
        self._lost_spares = 0 if expected else self._lost_spares + 1
        if self._lost_spares == MOST_LOST_SPARES:
            text = f"{MOST_LOST_SPARES} spares have died one after another; none is kept warm until the next fault"
            self.notice(text, "warning")
        if self._lost_spares < MOST_LOST_SPARES and not self.nursery.barren_for:
            self.crew.keep_warm(self.config.spares)

    def _spawn(self, count: int) -> None:
        """Processes are wanted: without them there is no next generation."""
        if self.nursery.barren_for:
            text = f"{count} fresh processes are wanted, and this node cannot start any: {self.nursery.barren_for}"
            self._end(words.End(int(ExitCode.BAD_NODE), text))
            return
        self.crew.spawn(count)

    def _barren(self, why: str) -> None:
        """No process can be started here any more: the job goes on for as long as it needs none."""
        text = f"this node can start no more processes: {why} Training goes on; the next fault that needs a new process"
        self.notice(f"{text} ends the job with exit code 75", "error")
        if self.world.phase in (world.Phase.GATHERING, world.Phase.PUBLISHING) and self.world.wanting:
            self._spawn(self.world.wanting)

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
        self.telemetry.emit(ledger.fault(fault, worker.look().mark_s if worker is not None else None))

    def _publish(self, roster: words.Roster) -> None:
        """A roster is known with the store its members meet on, and not before: until then deaths are still heard."""
        if roster.members and self.roster is not None and not self.config.wrapped and self._publishing is None:
            self.stores.renew()  # torch's own rendezvous wants a new store for every start (E12)
        if roster.members and self.stores.address is None:
            self._publishing = roster
            if self._storeless:
                self._storeless = False
                self.stores.renew()
            return
        self._publishing = None
        self.tell(words.Published(roster))

    def _enter(self, roster: words.Roster) -> None:
        assert self.stores.address is not None, "no loop turns between a roster's publication and its entry"
        if self.roster is not None:
            self.host.stopped(self.roster.generation)
            self._end_daemons()
        self.roster = roster
        self._tell_ranks(roster, self.stores.address)
        self._lost_spares = 0
        if not self.nursery.barren_for:
            self.crew.keep_warm(self.config.spares)

    def _tell_ranks(self, roster: words.Roster, store: tuple[str, int]) -> None:
        newcomers = self.crew.seat(roster)
        told = self.host.roster(roster)
        for rank, worker in self.crew.ranks.items():
            assigned = {
                "generation": roster.generation, "epoch": roster.epoch, "rank": rank, "world_size": roster.world_size,
                "store": list(store), "wrapped": self.config.wrapped, "companions": told.get(rank, {}),
            }  # fmt: skip
            if rank in newcomers:
                self.crew.begin(worker, assigned, store, roster.generation)
            else:
                worker.process.send({"kind": "world.assigned", **assigned})
        self.host.release()
        self.telemetry.emit(ledger.generation(roster, told))

    def _end_daemons(self) -> None:
        """What the last generation's functions have let go of holds ports and devices that the next one wants (LA-06).

        A survivor has ended the children that it still had itself.
        """
        self.nursery.end_daemons({w.process.number: w.lasting for w in self.crew if w.attached})

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

    def _store_ready(self) -> None:
        if self._publishing is not None:
            self._publish(self._publishing)

    def _store_failed(self, code: int, text: str) -> None:
        """No store: nothing to those who run; it is tried once more when a generation needs one."""
        if self.roster is None or self._publishing is not None:
            self._end(words.End(code, text))
            return
        self._storeless = True
        self.notice(f"{text}; it is tried again at the next fault", "error")

    # -- the end -------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self.nursery.reap()
            return
        name = signal.Signals(number).name
        if self.ending is not None:
            self.ending.again(name)
            return
        for worker in self.crew:
            if worker.begun:
                worker.process.signal(signal.SIGCONT)
                worker.process.signal(number)
        self.tell(words.EndRequested(ExitCode.SIGNALLED + number, f"ended by {name} from outside"))

    def _end(self, command: words.End) -> None:
        if self.ending is None:
            self.ending = Ending(command, self.loop, self.nursery, self.crew, self.config.grace_s, self.notice)
            self.ending.begin()

    def _close(self) -> int:
        assert self.ending is not None
        code, reason = self.ending.code, self.ending.reason
        for text in self.host.problems():
            self.notice(text, "error")
            if code == 0:
                code, reason = int(ExitCode.FAILED), text
        self.host.close()
        self.telemetry.emit(RunEnded(code=code, reason=reason))
        return code

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger; the display, a sink of it, shows it."""
        self.telemetry.emit(Notice(text=text, level=level))
