"""The driver: feeds the world machine with what happens on this node, and does what it commands.

Rule 1: nothing is decided here; `recovery.core.world` decides, `recovery.core.policy` says when it is enough.
Rule 2: one thread, nothing blocks; whatever waits is a timer or a descriptor of the loop.
Rule 3: features ride along as companions, known by their prefix alone.
"""

import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.clock import Clock
from everstep.errors import EverstepError, ExitCode
from everstep.events import Notice, RunEnded
from everstep.launcher.agent import draining, error_file, ledger
from everstep.launcher.agent.control import Control
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.draining import Draining
from everstep.launcher.agent.ending import Ending
from everstep.launcher.agent.examine import Examiner
from everstep.launcher.agent.frozen import EXIT_S, Unwatched
from everstep.launcher.agent.hearing import Hearing
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.monitors import Monitors
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.parting import Parting
from everstep.launcher.agent.single import Single
from everstep.launcher.agent.stores import Stores
from everstep.launcher.agent.together import Together
from everstep.launcher.agent.watch import INTERVAL_S, Watch
from everstep.launcher.agent.worker import Worker, log_root
from everstep.launcher.config import LaunchConfig
from everstep.launcher.core import limits
from everstep.launcher.nodes.api import Nodes
from everstep.launcher.nodes.membership import Membership
from everstep.process.loop import Loop
from everstep.process.shortage import Shortage
from everstep.recovery.api import Companion
from everstep.recovery.core import policy, words, world
from everstep.telemetry import Telemetry

MOST_LOST_SPARES = 8
RETURN_S = 60.0
"""From the news that all have completed to the end of a wrapped call, which waits for nothing but a clean-up then."""


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
        line: Membership | None = None,
    ) -> None:
        """`line`: to the agents of the other nodes; None where there are none."""
        self.config, self.loop, self.nursery, self.telemetry = config, loop, nursery, telemetry
        self.run_dir = run_dir
        self.clock: Clock = loop.clock
        self.nodes: Nodes = Single(self) if line is None else Together(self, line)
        self.hearing = Hearing(self)
        self.crew = Crew(config, nursery, log_root(config, run_dir), self.hearing.heard, self._gone, self.clock)
        self.draining = Draining(self)
        self.host = AgentHost(self, [*companions, Control(self), self.draining])
        self.examiner = Examiner(loop)
        self.parting = Parting(loop, config.grace_s, self.notice)
        own = limits.Own(config.soft_timeout_s, config.hard_timeout_s, config.first_timeout_s)
        self.watch = Watch(own, deaf=not config.wrapped)
        self.monitors = Monitors(self)
        self.world = world.begin(self.nodes.name, config.policy)
        self.unwatched = Unwatched(config.hard_timeout_s or EXIT_S)
        self.roster: words.Roster | None = None
        self.ending: Ending | None = None
        self.stores = Stores(loop, nursery, config.store_place, self.nodes.store_changed, self.nodes.store_failed)
        self._lost_spares, self._shortage = 0, Shortage()
        self._entered_s, self._lives = 0.0, dict[int, float]()  # how long each generation had run until its fault
        self._completed: int | None = None  # the generation whose last checkpoints are waited for
        self._probed_s = 0.0  # when those that have completed were asked whether they hear
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
            words.End: self.end,
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
                self.nodes.follow()
                self.draining.follow()
            self._inbox.popleft()
        due = world.wake_at(self.world)
        if due is not None and self.ending is None and due != self._due:
            self._due = due
            self.loop.later(max(0.0, due - self.clock.now()) + 0.001, lambda: self.tell(words.Ticked()))

    def run(self) -> int:
        """Serve until everything has ended; return the exit code."""
        self.loop.hear((*draining.HEARD, signal.SIGCHLD), self._signalled)
        self.nursery.on_barren = self._barren
        try:
            self.host.start()
            self.host.nodes(self.nodes.present)
            self.nodes.begin()
            self.tell(words.Ticked())
            self.crew.keep_warm(self._warm)
            self._tick()
            self.loop.run()
        except EverstepError as error:
            self.end(words.End(int(error.exit_code), str(error)))
            self.loop.run()
        return self._close()

    def _tick(self) -> None:
        now = self.clock.now()
        self.nursery.reap()
        self.nursery.look_for_undying(now)
        if self.ending is None:
            self.nursery.patrol({w.process.pid for w in self.crew if w.begun})
            self._look(now)
            self.monitors.look()
            for worker, text in self.unwatched.look(self.world.phase, self.crew, now):
                self.nodes.say(words.Wedged(worker.incarnation, text, self.crew.step()))
        self.nodes.look(now)
        self.host.tick(now)
        self.crew.shown.pump()
        self.loop.later(INTERVAL_S, self._tick)

    def _look(self, now: float) -> None:
        if self.world.phase is world.Phase.RUNNING and not self.examiner.busy:
            self.nodes.judge(now)

    def condemned(self, worker: Worker, verdict: limits.Verdict, evidence: str) -> None:
        """A rank hangs, and this is where it stands."""
        if self.ending is not None or worker.last is not None:  # meanwhile it has died, which says more
            return
        text = f"{verdict.reason}\n{evidence}".rstrip()
        held = verdict.action == "kill" or not worker.attached  # no function is on its stack that could be left
        if held and self.config.wrapped:  # of an unwrapped script all workers begin anew, whoever hears us
            self.nodes.say(words.Wedged(worker.incarnation, text, self.crew.step()))
        else:
            self.fault(worker, "stall", "page", text)

    def fault(
        self,
        worker: Worker,
        kind: str,
        noticed_by: str,
        text: str,
        generation: int | None = None,
        *,
        victim: bool = False,
    ) -> None:
        """A worker's function is at fault, in the present generation unless another is named."""
        if generation is None:
            generation = self.roster.generation if self.roster is not None else 0
        fault = words.Fault(
            generation=generation, kind=kind, noticed_by=noticed_by, incarnation=worker.incarnation, rank=worker.rank,
            step=self.crew.step(), text=text, victim=victim,
        )  # fmt: skip
        self.nodes.say(words.Faulted(fault))

    def _gone(self, worker: Worker, status: int) -> None:
        self.monitors.gone(worker)
        well = status == 0 and not worker.process.expected_end  # one that was sent SIGTERM may end well over it
        if worker.begun and not worker.attached and well and self.roster is not None:
            worker.done = True
            self._flag_early_exit(worker)
            self.nodes.say(words.Completed(self.roster.generation, worker.incarnation))
        unasked = worker.process.unasked and status != 0 and not worker.raised
        text = self._shortage.told() if status == -signal.SIGKILL and not worker.process.killed else ""
        step = self.crew.step()
        self.nodes.say(self.world.death_of(worker.incarnation, status, step, unasked=unasked, text=text))
        if self.ending is not None:
            self.ending.look()
        elif not worker.begun and self.world.phase is world.Phase.RUNNING:
            self._replenish(expected=worker.process.expected_end)

    def _flag_early_exit(self, worker: Worker) -> None:
        others = [w for w in self.crew.ranks.values() if w is not worker and not w.done]
        if others and self.config.wrapped:
            text = f"rank {worker.rank} has ended with 0 before it came to a wrapped call, while others run"
            self.notice(text, "warning")

    def _replenish(self, *, expected: bool) -> None:
        """A spare has died: make another, unless they die as fast as they are made."""
        self._lost_spares = 0 if expected else self._lost_spares + 1
        if self._lost_spares == MOST_LOST_SPARES:
            text = f"{MOST_LOST_SPARES} spares have died one after another; none is kept warm until the next fault"
            self.notice(text, "warning")
        if self._lost_spares < MOST_LOST_SPARES and not self.nursery.barren_for:
            self.crew.keep_warm(self._warm)

    @property
    def _warm(self) -> int:
        """How many processes wait here: a node without ranks has those of a whole node ready."""
        return self.config.spares + (0 if self.crew.ranks else self.config.nproc)

    def _spawn(self, count: int) -> None:
        """Processes are wanted in the place of lost ones, and without them there may be no next generation."""
        if not self.nursery.barren_for:
            self.crew.spawn(count)
        elif self.world.wanting:
            text = f"{count} fresh processes are wanted, and this node cannot start any: {self.nursery.barren_for}"
            story = f" Before it, {policy.told(self.world.causes[-1:])}." if self.world.causes else ""
            self.end(words.End(int(ExitCode.BAD_NODE), text + story))
        else:  # the others go on: nobody is awaited
            self.world = replace(self.world, policy=replace(self.world.policy, replace_deadline_s=0.0))
            self.tell(words.Ticked())

    def _barren(self, why: str) -> None:
        """No process can be started here any more: the job goes on for as long as it needs none."""
        least = self.world.policy.min_world_size
        shrinks = "" if least is None else f" that leaves fewer than {least} ranks"
        text = f"this node can start no more processes: {why} Training goes on; the next fault that needs a new process"
        self.notice(f"{text}{shrinks} ends the job with exit code 75", "error")
        if self.world.phase in (world.Phase.GATHERING, world.Phase.PUBLISHING) and self.world.vacant:
            self._spawn(self.world.vacant)

    # -- generations ---------------------------------------------------------------------------------------------

    def _stop(self, command: words.Stop) -> None:
        worker = self.crew.who(command.incarnation)
        if worker is None:
            return
        if self.config.wrapped:
            worker.process.send({"kind": "world.stop", "generation": command.generation})
        else:  # it would not hear us: all workers of an unwrapped script begin anew
            self.parting.end(worker.process, failed=worker.raised)

    def _kill(self, command: words.Kill) -> None:
        worker = self.crew.who(command.incarnation)
        if worker is not None:
            self.notice(f"{worker.process.name} (pid {worker.process.pid}) is killed: {command.reason}")
            worker.process.kill()

    def _report(self, fault: words.Fault) -> None:
        worker = self.crew.ranks.get(fault.rank) if fault.rank is not None else None
        mark_s = worker.marked_s if worker is not None else None
        if worker is None and fault.kind == "death":  # of another node: ours have waited for it since their last step
            mark_s = max((w.marked_s or 0.0 for w in self.crew.ranks.values()), default=0.0) or None
        self.telemetry.emit(ledger.fault(fault, mark_s))
        self.nodes.faulted(fault, self.clock.now())
        self._lives.setdefault(fault.generation, self.clock.now() - self._entered_s)

    def _publish(self, roster: words.Roster) -> None:
        """Propose what comes next; where an unwrapped script fails again and again at one place, not at once."""
        causes = self.world.causes
        repeats = bool(roster.members and causes) and causes[-1].generation == roster.generation - 1
        pause_s = policy.pause_s(self.world.policy, causes, self._lives) if repeats else 0.0
        if not pause_s:
            self.nodes.publish(roster)
            return
        self.notice(f"the same fault again, at the same place: the next attempt begins in {pause_s:g} s", "warning")
        self.loop.later(pause_s, lambda: self.nodes.publish(roster) if self.ending is None else None)

    def _enter(self, roster: words.Roster) -> None:
        store = self.nodes.store_of(roster)
        if self.roster is not None:
            self.host.stopped(self.roster.generation)
            self._end_daemons()
        self.roster, self._entered_s = roster, self.clock.now()
        self._tell_ranks(roster, store)
        self.stores.forget(roster.epoch, roster.generation)
        self.nodes.entered()
        self._lost_spares = 0
        if not self.nursery.barren_for:
            self.crew.keep_warm(self._warm)

    def _tell_ranks(self, roster: words.Roster, store: tuple[str, int]) -> None:
        newcomers = self.crew.seat(roster, self.nodes.name)
        told = self.host.roster(roster)
        for rank, worker in self.crew.ranks.items():
            assigned = {
                "generation": roster.generation, "epoch": roster.epoch, "rank": rank, "world_size": roster.world_size,
                "local": self.crew.local_of(rank), "group": list(self.crew.group), "store": list(store),
                "wrapped": self.config.wrapped, "companions": told.get(rank, {}),
            }  # fmt: skip
            if rank in newcomers:
                self.crew.begin(worker, assigned, store, roster.generation)
            else:
                worker.page.enter(roster.generation, self.clock.now())  # it is watched from here on, heard of or not
                worker.process.send({"kind": "world.assigned", **assigned})
        self.host.release()
        self.telemetry.emit(ledger.generation(roster, told, self.nodes.name, self.config.max_restarts))

    def _end_daemons(self) -> None:
        """What the last generation's functions have let go of holds ports and devices that the next one wants (LA-06).

        A survivor has ended the children that it still had itself.
        """
        self.nursery.end_daemons({w.process.number: w.lasting for w in self.crew if w.attached})

    def recheck(self) -> None:
        """Go on from draining when nothing intended is outstanding, and all members are known to hear us."""
        if self.ending is not None:
            self.ending.look()
            return
        if self._completed is None or not self.host.drained(completed=True):
            return
        if all((w.heard_s or 0.0) >= self._probed_s for w in self._hearers()):
            generation, self._completed = self._completed, None
            self.nodes.drained(generation)

    def _drain(self, command: words.Drain) -> None:
        """All have completed. One that has died over it, or cannot hear, is found now: later nobody may take its place.

        Who does not answer is found by `unwatched`, as everybody who waits for others.
        """
        self._completed, self._probed_s = command.generation, self.clock.now()
        self.nursery.reap()
        for worker in self._hearers():
            worker.process.send({"kind": "world.probe"})
        self.recheck()

    def _hearers(self) -> list[Worker]:
        """Members whose line to us is open: a script without the wrapper, and who is dead, hears nothing."""
        lines = ((w, w.process.line) for w in self.crew.ranks.values() if w.attached and w.last is None)
        return [worker for worker, line in lines if line is not None and not line.ended]

    def _finish(self, generation: int) -> None:
        for worker in self.crew.ranks.values():
            worker.process.expected_end = True
            worker.process.send({"kind": "world.finish", "generation": generation})
        self.crew.let_spares_go()
        limit_s = max(self.config.hard_timeout_s or RETURN_S, self.world.policy.stop_deadline_s)
        self.loop.later(limit_s, lambda: self._see_them_return(limit_s))

    def _see_them_return(self, limit_s: float) -> None:
        """Only what is ours lies between the news of the end and the end of the call."""
        for worker in self._hearers():
            if not worker.left:
                text = f"its call has not returned {limit_s:g} s after all had completed"
                self.nodes.say(words.Wedged(worker.incarnation, text, self.crew.step()))

    # -- the end -------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self.nursery.reap()
            return
        name = signal.Signals(number).name
        if number == signal.SIGUSR1 and not self.config.wrapped:
            self.signalled(number)  # it may be a warning: what it means the script knows
            return
        if self.ending is not None:
            self.ending.again(name)
        elif self.draining.begun:
            self.draining.again(name)
        elif self.config.wrapped and number in draining.SIGNALS:
            self.drain(number, f"{name} from outside")
        else:
            self._end_by(number, name)

    def drain(self, number: int = signal.SIGTERM, why: str = "an operator") -> None:
        """Ask the job to end in order, on all nodes: see `Draining.begin`."""
        self.draining.begin(number, why)

    def _end_by(self, number: int, name: str) -> None:
        self.signalled(number)
        self.nodes.say(words.EndRequested(ExitCode.SIGNALLED + number, f"ended by {name} from outside"))

    def signalled(self, number: int) -> None:
        """Pass a signal on to the workers; those whose state is to be saved from memory end at once."""
        for worker in self.crew:
            if self.draining.kills(worker):
                worker.process.kill()
            elif worker.begun:
                worker.process.signal(signal.SIGCONT)
                worker.process.signal(number)

    def end(self, command: words.End) -> None:
        """The job is over: everybody here ends."""
        if self.ending is None:
            command = replace(command, reason="; ".join([command.reason, *self.nursery.undying]))
            self.ending = Ending(
                self.draining.ends(command), self.loop, self.nursery, self.crew, self.draining.left_s, self.notice,
                lambda: self.nodes.cut_off or self.host.drained(completed=self.draining.begun),
                strict=self.draining.begun,
            )  # fmt: skip
            self.nodes.ending(command)
            self.ending.begin()
            if command.code != 0 and not self.draining.begun:
                self.telemetry.emit(Notice(text=command.reason, level="error", closing=True))

    def _close(self) -> int:
        assert self.ending is not None
        self.crew.shown.settle(self.clock.now)
        code, reason = self.ending.code, self.ending.reason
        problems = [*self.nodes.problems(), *self.host.problems()]
        if problems:  # most were told when they came: the last words are one line
            more = f" (and {len(problems) - 1} more, told before)" if len(problems) > 1 else ""
            text = problems[-1] + more
            if code == 0:
                code, reason = int(ExitCode.FAILED), text
            self.telemetry.emit(Notice(text=text, level="error", closing=True))
        if self.draining.begun:
            code, reason = self.draining.verdict(code, reason)
            self.telemetry.emit(Notice(text=reason, level="error" if code == ExitCode.FAILED else "info", closing=True))
        error_file.hand_on(self.crew.error_files, self.world.causes, code, reason)
        self.host.close()
        self.nodes.close()
        self.telemetry.emit(RunEnded(code=code, reason=reason))
        return code

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger; the display, a sink of it, shows it."""
        self.telemetry.emit(Notice(text=text, level=level))
