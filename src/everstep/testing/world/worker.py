"""A simulated worker: the real member table, with two threads' worth of moves and a function that does collectives.

It acts upon the actions that the table orders, never upon a phase, so that an action that is missing or out of place
shows: a function that nobody interrupts stays on the stack, a call that nobody runs never ends.
"""

from collections import deque
from collections.abc import Callable, Iterable

from everstep.recovery.core import member
from everstep.recovery.core.member import Phase
from everstep.recovery.core.words import Arrived, Completed, Facts, Fault, Faulted, Incarnation
from everstep.testing.world.scene import Scene

Word = Arrived | Completed | Faulted | None  # what a worker says to its agent; None: its end
Peers = Callable[[int], Iterable["SimulatedWorker"]]


class SimulatedWorker:
    """One process."""

    def __init__(self, scene: Scene, node: str, slot: int, number: int, peers: Peers) -> None:
        self.scene, self.node, self.slot = scene, node, slot
        self.incarnation = Incarnation(node, number, 0)
        self.own = member.begin()
        self.rank: int | None = None
        self.completed: set[int] = set()  # generations
        self.status: int | None = None  # of its end
        self.wedged = self.stuck = self.dirty = self.ill = self.cut = False
        self.bereaved = False  # what its function raises is that a peer is gone
        # What really goes on in it, whatever the table says.
        self.scripting = self.calling = self.cleaning = self.returning = self.leaving = False
        self.arrived_for = -1
        self.preparing = self.finalizing = False  # the first part of the function; of cleaning
        self.on_stack = self.aborted = self.interrupted = self.unwinding = self.blocked = False
        self.steps = 0
        self.outbox: deque[Word] = deque()
        self.inbox: deque[member.Event] = deque()
        self.on_word: Callable[[], None] = lambda: None  # its agent's move: read one word of the outbox
        self.on_death: Callable[[], None] = lambda: None
        self.bad_exit = 0
        self._peers = peers

    def __str__(self) -> str:
        return f"{self.incarnation} (rank {self.rank}, {self.own.phase.value})"

    @property
    def alive(self) -> bool:
        """Tell whether this process runs."""
        return self.status is None

    @property
    def well(self) -> bool:
        """Tell whether it lives and nothing has befallen it."""
        return self.alive and not self.wedged and not self.stuck

    # Its two lines.

    def hear(self, event: member.Event) -> None:
        """The agent says something; it is read in order, perhaps twice."""
        if self.cut:
            return
        self.cut = isinstance(event, member.LinkLost)
        for _ in range(2 if self.scene.chance(0.1) else 1):
            self.inbox.append(event)
            self.scene.soon(self._read)

    def _read(self) -> None:
        if self.alive and not self.wedged and self.inbox:
            self.step(self.inbox.popleft())

    def say(self, word: Word) -> None:
        """Say something to the agent."""
        self.outbox.append(word)
        self.scene.soon(self.on_word)

    def die(self, status: int) -> None:
        """End, now; what was said before is read before the end is seen."""
        if self.alive:
            self.status = status
            self.on_death()
            self.scene.tell(self, "ends with", status)
            self.say(None)

    # Its table.

    def step(self, event: member.Event) -> None:
        """Step the table, and do what it orders."""
        if not self.alive or self.wedged:
            return
        self.own, actions = member.step(self.own, event)
        self.scene.tell(self.incarnation, event, "→", self.own.phase.value, *(a.value for a in actions))
        for action in actions:
            getattr(self, f"_{action.name.lower()}")()
        assert self.own.phase is self._real(), f"{self} should be {self._real().value} after {event}"

    def _real(self) -> Phase:
        """Return where it stands by what really goes on in it."""
        for holds, phase in (
            (self.leaving, Phase.LEFT),
            (self.returning, Phase.DONE),
            (self.cleaning, Phase.CHECKING),
            ((self.calling or self.on_stack) and self.interrupted, Phase.UNWINDING),
            (self.calling or self.on_stack, Phase.RUNNING),
            (self.scripting and self.arrived_for > self.own.generation, Phase.RECALLED),
            (self.scripting, Phase.BEGINNING),
            (self.arrived_for > self.own.generation, Phase.WAITING),
            (self.own.generation in self.completed, Phase.COMPLETING),
        ):
            if holds:
                return phase
        return Phase.FRESH

    def _begin(self) -> None:
        self.scripting = True
        self.scene.soon(self._called)

    def _called(self) -> None:
        self.scripting = False
        self.step(member.Called())

    def _run(self) -> None:
        self.calling, self.interrupted = True, False
        self.scene.soon(self._call)

    def _call(self) -> None:
        assert not self.on_stack, f"{self} calls the function inside the function"
        if not self.alive or self.wedged:
            return
        self.calling = False
        generation = self.own.generation
        self.steps = self.scene.start_of.setdefault(generation, self.scene.done)
        if self.own.phase is Phase.RUNNING:
            self.on_stack = self.preparing = True
            self.aborted = self.unwinding = self.blocked = False
            self.scene.soon(self.act)
        else:
            self.step(member.Unwound())

    def _report_fault(self) -> None:
        generation, step = self.own.generation, self.scene.done
        fault = Fault(generation, "exception", "worker", self.incarnation, self.rank, step, victim=self.bereaved)
        self.say(Faulted(fault))

    def _report_completed(self) -> None:
        self.completed.add(self.own.generation)
        self.say(Completed(self.own.generation, self.incarnation))

    def _abort(self) -> None:
        self.aborted = True

    def _interrupt(self) -> None:
        self.interrupted = True
        self.scene.soon(self.act)

    def _clean(self) -> None:
        assert not self.on_stack, f"{self} is cleaned under its function"
        assert self.aborted, f"{self} is cleaned with its groups alive"
        self.cleaning = self.finalizing = True
        self.scene.soon(self._finalized)

    def _finalized(self) -> None:
        if self.well:
            self.finalizing = False
            self.scene.soon(self._cleaned)

    def _cleaned(self) -> None:
        if not self.well:
            return
        self.cleaning = False
        ill = self.ill or (not self.scene.setting.hale and self.scene.chance(0.15))
        self.step(member.Unhealthy() if ill else member.Healthy())
        self.ill = False
        if self.returning:
            self.scene.soon(lambda: self._exit(self.bad_exit))

    def _arrive(self) -> None:
        assert not self.on_stack, f"{self} arrives with its function on the stack"
        self.arrived_for = self.own.generation + 1
        dirt = ("autocast",) if self.dirty else ()
        self.say(
            Arrived(self.own.generation + 1, self.incarnation, Facts(self.node, self.slot, False, self.rank, dirt))
        )

    def _return(self) -> None:
        assert not self.on_stack, f"{self} returns with its function on the stack"
        self.returning = True
        if not self.cleaning:  # the main thread does both
            self.scene.soon(lambda: self._exit(self.bad_exit))

    def _leave(self) -> None:
        self.leaving = True
        self.scene.soon(self.act)
        left = 0 if self.rank is None else 1
        self.scene.soon(lambda: self._exit(left))

    def _exit(self, status: int) -> None:
        """Come to the end of the script; a process that cannot run does not."""
        if not self.wedged:
            self.die(status)

    # Its function: it makes its groups, then come `steps` collectives, each of which needs everybody.

    def act(self) -> None:
        """Go on with the function, if it can."""
        if not self.on_stack or not self.well:
            return
        if self.own.phase is Phase.LEFT:
            self._end(self.scene.rng.choice((member.Returned(), member.Raised())))
            return
        if self.own.phase is not Phase.RUNNING:
            self._unwind()
            return
        if self.preparing:
            self.preparing = False
            self._wake()
            self.scene.soon(self.act)
            return
        if self.steps >= self.scene.setting.steps:
            self._end(member.Returned())
            return
        peers = list(self._peers(self.own.generation))
        if all(p.with_us(self.own.generation, self.steps) for p in peers):
            self.steps += 1
            self.scene.done = max(self.scene.done, min(p.steps for p in peers))
            self._wake()
            self.scene.soon(self.act)
        elif any(not p.alive for p in peers) and self.scene.chance(0.3):
            self.bereaved = True
            self._end(member.Raised())
            self.bereaved = False
        else:
            self.blocked = True

    def _unwind(self) -> None:
        """The interrupt is in the function: its own clean-up runs, then it ends one way or another."""
        if self.unwinding:
            self._end(self.scene.rng.choice((member.Unwound(), member.Unwound(), member.Returned(), member.Raised())))
        elif self.aborted and self.interrupted:
            self.unwinding = True
            self.scene.soon(self.act)

    def with_us(self, generation: int, steps: int) -> bool:
        """Tell whether this one has come as far in the same generation."""
        here = (self.on_stack and self.well and not self.preparing) or generation in self.completed
        return here and self.own.generation == generation and self.steps >= steps

    def _wake(self) -> None:
        for peer in self._peers(self.own.generation):
            if peer.blocked:
                peer.blocked = False
                self.scene.soon(peer.act)

    def fail(self) -> None:
        """Raise an exception in the function."""
        if self.on_stack and self.own.phase in (Phase.RUNNING, Phase.UNWINDING):
            self._end(member.Raised())

    def _end(self, event: member.Event) -> None:
        self.on_stack = self.preparing = False
        self.step(event)


class UnwrappedWorker(SimulatedWorker):
    """A process whose script does not know us: it hears nothing, completes by ending with 0, and a stop kills it."""

    def step(self, event: member.Event) -> None:
        """Only the rank is given, with the environment."""
        match event:
            case member.Entered(generation) if self.own.phase is Phase.FRESH:
                self.own = member.Own(Phase.RUNNING, generation)
                self._run()
            case member.Returned():
                self._report_completed()
                self.die(0)
            case member.Raised():
                self.die(1)
            case member.Excluded():
                self.die(0)
            case _:
                return
