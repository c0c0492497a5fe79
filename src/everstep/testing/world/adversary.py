"""What befalls the processes of the simulated world: anything at any time, or a chosen harm at a chosen moment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from everstep.recovery.core import member
from everstep.recovery.core.words import Event, Fault, Faulted, Incarnation, Wedged
from everstep.testing.world.laws import Laws
from everstep.testing.world.moments import Strike, holder, newest, stands_at
from everstep.testing.world.scene import Scene
from everstep.testing.world.worker import SimulatedWorker

STRIKES = ("raise", "kill", "leave", "hang", "stop", "cut", "taint", "end", "store")
"""What can be done at any moment: an exception, SIGKILL, an exit with 0, a hang, a process that cannot run (SIGSTOP, or
the interpreter lock held), a lost line to the agent, state that cannot be reset, a signal, the store's death."""


class Powers(Protocol):
    """What the world does on the adversary's behalf."""

    @property
    def scene(self) -> Scene:
        """Where it happens."""
        ...

    @property
    def laws(self) -> Laws:
        """Who has to know of it."""
        ...

    @property
    def workers(self) -> Mapping[Incarnation, SimulatedWorker]:
        """Whom it may befall."""
        ...

    def notice(self, worker: SimulatedWorker, event: Event) -> None:
        """Its agent will notice, if it still lives then."""
        ...

    def signal(self) -> None:
        """Somebody outside wants the end."""
        ...

    def lose_board(self) -> None:
        """The store is gone; another will come."""
        ...


class Adversary:
    """Does harm, by chance or as it was told."""

    def __init__(self, powers: Powers, strikes: Sequence[Strike]) -> None:
        self._powers, self._scene = powers, powers.scene
        self.strikes = list(strikes)
        self.left = powers.scene.setting.harms

    # By chance.

    def act(self, *, focused: bool) -> None:
        """Perhaps do harm, rather where some agent stands in the phase that is in focus."""
        scene = self._scene
        if self.left and scene.chance((1.0 if focused else 0.1) / (3 + scene.setting.ranks)):
            living = [w for w in self._powers.workers.values() if w.alive and (scene.board or scene.chance(0.1))]
            if living:
                self._harm(scene.rng.choice(living))
        if scene.setting.end_wanted and focused and not self._powers.laws.reasons and scene.chance(0.2):
            self._powers.signal()

    def _harm(self, worker: SimulatedWorker) -> None:
        harms = [self._kill, self._stop, self._spoil]
        if not self._scene.setting.unwrapped:
            harms.append(self._cut)
        if worker.on_stack and worker.well:
            harms += [self._raise, self._raise, self._hang, self._leave]
        if worker.well and worker.rank is not None and not worker.returning:
            harms.append(self._alarm)
        harm = self._scene.rng.choice(harms)
        self._scene.tell("harm:", harm.__name__, worker)
        self.left -= 1
        harm(worker)

    # As it was told.

    def look(self) -> None:
        """Strike, if the moment has come."""
        if self.strikes and self._due(self.strikes[0]):
            self._strike(self.strikes.pop(0))
            while self.strikes and self.strikes[0].at_once:
                self._strike(self.strikes.pop(0))

    def _due(self, strike: Strike) -> bool:
        if strike.generation is not None and newest(self._scene) < strike.generation:
            return False
        worker = holder(self._scene, self._powers.workers, strike.rank)
        return worker is not None and stands_at(self._scene, worker) is strike.moment

    def _strike(self, strike: Strike) -> None:
        whom = strike.rank if strike.victim is None else strike.victim
        worker = holder(self._scene, self._powers.workers, whom)
        assert worker is not None, "what comes at once comes with one that was due"
        self._scene.tell("strike:", strike.harm, worker)
        if strike.harm == "end":
            self._powers.signal()
        elif strike.harm == "store":
            self._powers.lose_board()
        elif worker.alive:
            self._harm_named(strike.harm)(worker)

    def _harm_named(self, name: str) -> Callable[[SimulatedWorker], None]:
        return {
            "raise": self._raise, "kill": self._kill, "leave": self._leave, "hang": self._hang, "stop": self._stop,
            "cut": self._cut, "taint": self._taint,
        }[name]  # fmt: skip

    # Harms.

    def _raise(self, worker: SimulatedWorker) -> None:
        """In the function, or in cleaning, which then has failed; elsewhere it ends the process."""
        if worker.cleaning:
            worker.ill = True
        elif worker.calling or worker.on_stack:
            self._powers.laws.hurt(worker)
            worker.fail()
        else:
            worker.die(1)

    def _kill(self, worker: SimulatedWorker) -> None:
        worker.die(-9)

    def _leave(self, worker: SimulatedWorker) -> None:
        worker.die(0)

    def _cut(self, worker: SimulatedWorker) -> None:
        """Its line to the agent breaks: it ends by itself. A script that does not know us has no line."""
        self._powers.laws.hurt(worker)
        worker.hear(member.LinkLost())

    def _stop(self, worker: SimulatedWorker) -> None:
        self._powers.laws.hurt(worker)
        worker.wedged = True
        self._powers.notice(worker, Wedged(worker.incarnation, "", self._scene.done))

    def _hang(self, worker: SimulatedWorker) -> None:
        """Where no interrupt reaches it: seen on its page in the function, by what does not follow in cleaning."""
        if worker.on_stack or worker.cleaning:
            self._powers.laws.hurt(worker)
            worker.stuck = True
            if worker.on_stack:
                self._alarm(worker)
        else:
            self._stop(worker)

    def _alarm(self, worker: SimulatedWorker) -> None:
        """Its page has not moved for a while, which may be nothing."""
        self._powers.laws.hurt(worker)
        fault = Fault(worker.own.generation, "stall", "page", worker.incarnation, worker.rank, self._scene.done)
        self._powers.notice(worker, Faulted(fault))

    def _taint(self, worker: SimulatedWorker) -> None:
        """It will not be itself when it comes back."""
        worker.dirty = True

    def _spoil(self, worker: SimulatedWorker) -> None:
        """It will not be itself when it comes back, or not end well."""
        what = self._scene.rng.choice(("dirty", "dirty", "ill", "ill", "bad"))
        worker.dirty |= what == "dirty"
        worker.ill |= what == "ill"
        worker.bad_exit = 3 if what == "bad" else worker.bad_exit
