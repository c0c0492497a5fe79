"""The simulated world: agents with the real world table, a board with compare-and-set, and an adversary.

What a driver must keep to, and what this world therefore keeps to:

* what a worker says is read in order, and to its end before the worker's death is told;
* every fact reaches every agent at least once, at any time, in any order between workers;
* a death is told with the stage that the worker's own agent knew (`World.death_of`);
* of one generation one roster wins, and every agent hears which.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from everstep.errors import ProtocolError
from everstep.recovery.core import guards, member, world
from everstep.recovery.core.words import (
    Announced,
    Command,
    Drain,
    Drained,
    End,
    EndRequested,
    Enter,
    Event,
    Facts,
    Finish,
    Incarnation,
    Kill,
    Publish,
    Published,
    Report,
    Roster,
    Spawn,
    Stop,
    Ticked,
)
from everstep.recovery.core.world import Phase
from everstep.testing.world.adversary import Adversary
from everstep.testing.world.laws import Laws
from everstep.testing.world.moments import Strike
from everstep.testing.world.scene import Scene, Setting
from everstep.testing.world.witness import Witness
from everstep.testing.world.worker import SimulatedWorker, UnwrappedWorker

MOST_MOVES = 200_000


class SimulatedAgent:
    """One node: its agent's view and its processes."""

    def __init__(self, scene: "SimulatedWorld", number: int) -> None:
        setting = scene.setting
        self.scene, self.number, self.name = scene, number, f"node{number}"
        self.share = setting.share(number)
        self.slowness = setting.slowness[number % len(setting.slowness)]
        policy = replace(setting.policy, local_world_size=self.share)
        self.view = world.begin(self.name, policy)
        self.witness = Witness(self.name, setting.ranks, policy.min_world_size)
        self.workers: list[SimulatedWorker] = []
        self.starting = 0
        self.letting_go = False
        self.end: End | None = None

    # Hearing.

    def hear(self, event: Event) -> None:
        """Step the table and do what it orders."""
        before = self.view.phase
        self.view, commands = world.step(self.view, event, self.scene.now)
        self.scene.tell(self.name, event, "→", self.view.phase.value, self.view.generation, *commands)
        self.scene.laws.judge(self.witness, before, event, self.view.phase, commands)
        for command in commands:
            self._do(command)
        self._keep_spares()

    def read(self, worker: SimulatedWorker) -> None:
        """Read one word of a worker of ours, and pass it on to all."""
        word = worker.outbox.popleft()
        if word is not None:
            self.scene.spread(word, self)
            return
        assert worker.status is not None, "the end is said last"
        death = self.view.death_of(worker.incarnation, worker.status, self.scene.done)
        if death.stage == "fresh" and death.status != 0:
            self.scene.laws.bad_starts += 1
        self.scene.spread(death, self)

    # Doing.

    def _do(self, command: Command) -> None:
        getattr(self, f"_{type(command).__name__.lower()}")(command)

    def _report(self, command: Report) -> None:
        self.scene.tell(self.name, "ledger:", command.fault)

    def _stop(self, command: Stop) -> None:
        worker = self.scene.workers[command.incarnation]
        if not self.scene.setting.unwrapped:
            self._tell(command.incarnation, member.Told(command.generation))
        elif worker.node == self.name:
            self.scene.soon(lambda: worker.die(-9))  # stopped or not

    def _kill(self, command: Kill) -> None:
        self.scene.soon(lambda: self.scene.workers[command.incarnation].die(-9))

    def _spawn(self, command: Spawn) -> None:
        self.start(command.count - self.starting)

    def _publish(self, command: Publish) -> None:
        self.scene.soon(lambda: self.scene.publish(command.roster), self.slowness)

    def _enter(self, command: Enter) -> None:
        for listed in command.roster.members:
            self._tell(listed.incarnation, member.Entered(command.roster.generation))

    def _drain(self, command: Drain) -> None:
        if not self.scene.setting.lost_checkpoints:
            for _ in range(1 + self.scene.chance(0.2)):
                self.scene.soon(lambda: self._drained(command.generation), self.scene.setting.slow_drain)

    def _drained(self, generation: int) -> None:
        present = self.view.phase not in (Phase.GATHERING, Phase.RUNNING) and generation == self.witness.entered
        self.hear(Drained() if present and self.scene.chance(0.5) else Drained(generation))

    def _finish(self, command: Finish) -> None:
        self.letting_go = True
        for worker in self.workers:
            if worker.alive:
                named = worker.rank is not None
                worker.hear(member.Finished(command.generation) if named else member.Excluded())

    def _end(self, command: End) -> None:
        self.end = command
        self.letting_go = True
        for worker in self.workers:
            if worker.well and not self.scene.setting.unwrapped:
                worker.hear(member.LinkLost())
            elif worker.alive:
                self.scene.soon(partial(worker.die, -9))
        if command.code != 0:
            self.scene.ask_to_end(EndRequested(command.code, command.reason))

    def _tell(self, who: Incarnation, event: member.Event) -> None:
        worker = self.scene.workers[who]
        if worker.node == self.name and worker.alive:
            if isinstance(event, member.Entered):
                rank = self.scene.board[event.generation].rank_of(who)
                assert rank is not None, "told by the roster that lists it"
                self.scene.laws.takes(worker, rank)
                worker.rank = rank
            worker.hear(event)

    # Processes.

    def _keep_spares(self) -> None:
        """A driver's own policy: keep some standbys warm, unless they keep failing."""
        if self.view.phase is Phase.RUNNING and len(self.view.false_starts) < guards.FALSE_STARTS:
            standby = sum(s.facts.node == self.name for s in self.view.standbys.values())
            self.start(self.scene.setting.spares - standby - self.starting)

    def start(self, count: int) -> None:
        """Have so many more processes started."""
        for _ in range(count):
            self.starting += 1
            self.scene.soon(self._started, self.slowness)

    def _started(self) -> None:
        setting = self.scene.setting
        self.starting -= 1
        if self.letting_go or (setting.starved and self.view.roster is not None):
            return
        kind = UnwrappedWorker if setting.unwrapped else SimulatedWorker
        number = len(self.scene.workers)
        worker = kind(self.scene, self.name, len(self.workers), number, self.scene.peers)
        worker.on_word = lambda: self.read(worker)
        worker.on_death = lambda: self.scene.laws.died(worker)
        self.workers.append(worker)
        self.scene.workers[worker.incarnation] = worker
        if not setting.hale and self.scene.chance(0.5 if setting.sickly and self.view.roster else 0.02 / setting.ranks):
            worker.die(1)  # before it was announced; nobody else need know
            return
        facts = Facts(self.name, worker.slot, fresh=True)
        self.scene.spread(Announced(worker.incarnation, facts), self)


class SimulatedWorld(Scene):
    """Agents, workers, the board and the adversary."""

    def __init__(self, setting: Setting, strikes: Sequence[Strike] = ()) -> None:
        super().__init__(setting)
        self.workers = dict[Incarnation, SimulatedWorker]()
        self.laws = Laws(self, self.workers)
        self.moves = 0
        self._proposed: list[Roster] | None = None  # waits for the next store; None: there is one
        self.adversary = Adversary(self, strikes)
        self.agents = [SimulatedAgent(self, number) for number in range(setting.nodes + setting.idle_nodes)]

    def run(self) -> Iterable[End]:
        """Run to the end; return each agent's. Raises Violation, or ProtocolError, where a law is broken."""
        for agent in self.agents:
            agent.hear(Ticked())
            agent.start(self.setting.spares)
        while any(agent.end is None for agent in self.agents):
            self.moves += 1
            self.laws.require(self.moves < MOST_MOVES, "no end in sight")
            try:
                self._trouble()
                if not self.draw():
                    self._wait()
                self.adversary.look()
            except (ProtocolError, AssertionError, LookupError) as error:
                raise type(error)(f"{error}\n{self.story()}") from error
        while self.draw():
            pass
        return [agent.end for agent in self.agents if agent.end]

    def peers(self, generation: int) -> Iterable[SimulatedWorker]:
        """Return the members of a generation."""
        return [self.workers[m.incarnation] for m in self.board[generation].members]

    # The network.

    def spread(self, event: Event, source: SimulatedAgent) -> None:
        """Its own agent hears it at once; the others, and some twice, when it comes."""
        for agent in self.agents:
            copies = (agent is not source) + self.chance(0.08)
            for _ in range(copies):
                self.soon(partial(agent.hear, event), agent.slowness)
        source.hear(event)

    def publish(self, roster: Roster) -> None:
        """Create-only compare-and-set; the winner is told to all."""
        if self._proposed is not None:
            self._proposed.append(roster)
            return
        if roster.generation in self.board or (self.setting.mute and self.board):
            return
        self.board[roster.generation] = roster
        self.tell("won:", roster)
        self.laws.won(roster)
        for agent in self.agents:
            for _ in range(2 if self.chance(0.1) else 1):
                self.soon(partial(agent.hear, Published(roster)), agent.slowness)

    def ask_to_end(self, event: EndRequested) -> None:
        """Somebody wants the end: all hear of it."""
        for agent in self.agents:
            self.soon(partial(agent.hear, event), agent.slowness)

    # Time.

    def _wait(self) -> None:
        """Nobody can move: time passes, if anybody waits for it and somebody has a reason to keep others waiting."""
        alarms = [at for a in self.agents if a.end is None and (at := world.wake_at(a.view)) is not None]
        culprits = [w for w in self.workers.values() if w.alive and not w.well]
        setting = self.setting
        excuse = culprits or setting.starved or setting.mute or setting.lost_checkpoints
        self.laws.require(alarms and excuse, "nobody can move")
        self.now = max(self.now, min(alarms))
        self._tick()

    def _tick(self) -> None:
        for agent in self.agents:
            self.soon(partial(agent.hear, Ticked()), agent.slowness)

    def _trouble(self) -> None:
        """Time passes now and then, and the adversary does harm."""
        if self.chance(0.01):
            self.now += self.rng.choice((0.1, 3.0, 11.0))
            self._tick()
        self.adversary.act(focused=any(a.view.phase is self.setting.focus for a in self.agents))

    # What the adversary may do to it: see `Powers`.

    @property
    def scene(self) -> Scene:
        """See `Powers.scene`."""
        return self

    def notice(self, worker: SimulatedWorker, event: Event) -> None:
        """See `Powers.notice`."""
        agent = next(a for a in self.agents if a.name == worker.node)
        self.soon(lambda: self.spread(event, agent) if worker.alive else None)

    def signal(self) -> None:
        """See `Powers.signal`."""
        self.laws.reasons.add("SIGTERM")
        self.ask_to_end(EndRequested(143, "SIGTERM"))

    def lose_board(self) -> None:
        """See `Powers.lose_board`. Who waits in it to meet the others fails."""
        self._proposed = []
        for worker in self.workers.values():
            if worker.well and worker.preparing and worker.on_stack:
                self.laws.hurt(worker)
                worker.fail()
        self.soon(self._board_is_back, 0.9)

    def _board_is_back(self) -> None:
        proposed, self._proposed = self._proposed, None
        for roster in proposed or ():
            self.publish(roster)
