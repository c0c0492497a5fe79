"""What an agent knows of the world: facts, and the phase that follows from them.

Rule 1: facts only grow within their generation; they are dropped when it is over, never changed.
Rule 2: what can be derived is not stored, but for `ranks`, `own`, `homes` and `lost`: they spare a walk over all ranks
        at every event. Nor may an event cost a copy of what thousands of others have left: arrivals are kept in a
        `Growing`.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from everstep.recovery.core.assignment import Nodes, Standby, fillable
from everstep.recovery.core.growing import Growing
from everstep.recovery.core.words import Died, Facts, Fault, Incarnation, Member, Policy, Roster, Stage

Arrivals = Growing[Incarnation, Facts]
NOBODY = Arrivals()


class Phase(enum.Enum):
    """Where the world stands, as this agent sees it."""

    GATHERING = "gathering"  # the roster of `generation` is open
    PUBLISHING = "publishing"  # a roster for `generation`, or the end, has been proposed; not yet known who won
    RUNNING = "running"  # the roster of `generation` has been entered
    DRAINING = "draining"  # all members have completed; the last intended checkpoints are on their way
    FINISHING = "finishing"  # it is published that the generation is finished; members return and exit
    ENDED = "ended"  # the job is over


@dataclass(frozen=True, slots=True)
class World:
    """One agent's view. Early facts of later generations are kept, for they come only once for certain."""

    node: str
    policy: Policy
    epoch: int
    phase: Phase = Phase.GATHERING
    generation: int = 0  # open (gathering, publishing) or entered (running, draining); finishing: the one not to come
    since: float | None = None  # when this phase's deadline began to run; None before the first event
    roster: Roster | None = None  # the last one entered
    ranks: Mapping[Incarnation, int] = field(default_factory=dict[Incarnation, int])  # of `roster`
    own: tuple[Incarnation, ...] = ()  # of `roster`, those of this node
    homes: frozenset[str] = frozenset()  # of `roster`, the nodes of its members
    lost: frozenset[Incarnation] = frozenset()  # members of `roster` that are dead
    gone: frozenset[str] = frozenset()  # nodes that are lost, and of which no new process has come since
    bereft: float = 0.0  # when a process was last lost: from then on its replacement is awaited
    standbys: Mapping[Incarnation, Standby] = field(default_factory=dict[Incarnation, Standby])
    arrived: Mapping[int, Arrivals] = field(default_factory=dict[int, Arrivals])
    tainted: frozenset[tuple[int, Incarnation]] = frozenset()  # who arrived for which generation with dirt
    completed: Mapping[int, frozenset[Incarnation]] = field(default_factory=dict[int, frozenset[Incarnation]])
    published: Mapping[int, Roster] = field(default_factory=dict[int, Roster])
    faults: tuple[Fault, ...] = ()  # known, of this and later generations
    causes: tuple[Fault, ...] = ()  # why each generation before this one ended, as far as it is known here
    dead: Mapping[Incarnation, Died] = field(default_factory=dict[Incarnation, Died])
    killed: frozenset[Incarnation] = frozenset()  # by our own order
    asked: int = 0  # fresh processes that this node was asked for and that have not been announced
    false_starts: tuple[Died, ...] = ()  # fresh processes that failed, since a roster was last opened or entered
    shortfall: str = ""  # what this agent would publish as given up on the way to the end

    def may_kill(self, incarnation: Incarnation) -> bool:
        """Tell whether this is a process of our node that has not been ordered killed."""
        if incarnation in self.ranks:
            node = self.members[self.ranks[incarnation]].node
        elif incarnation in self.standbys:
            node = self.standbys[incarnation].facts.node
        else:
            return False
        return node == self.node and incarnation not in self.killed

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the last roster entered, dead ones included."""
        return self.roster.members if self.roster else ()

    @property
    def here(self) -> Mapping[Incarnation, Facts]:
        """Who has arrived for the present generation."""
        return self.arrived.get(self.generation, NOBODY)

    @property
    def survivors(self) -> Mapping[Incarnation, Facts]:
        """Members of the last roster that have arrived and live: a death overrides an arrival."""
        here = self.here
        return {i: here[i] for i in self.ranks if i in here and i not in self.lost}

    def listed(self, incarnation: Incarnation | None) -> bool:
        """Tell whether the last roster entered names this incarnation."""
        return incarnation in self.ranks

    def death_of(
        self, incarnation: Incarnation, status: int, step: int | None = None, *, unasked: bool = False, text: str = ""
    ) -> Died:
        """Return what the agent of a dead process shall tell of it."""
        generation = self.roster.generation if self.roster else None
        return Died(incarnation, status, self.stage_of(incarnation), step, generation, unasked, text)

    def stage_of(self, incarnation: Incarnation) -> Stage:
        """Say how far this process has come."""
        if incarnation not in self.ranks:
            return "fresh"
        return "completed" if incarnation in self.returners else "running"

    @property
    def returners(self) -> frozenset[Incarnation]:
        """Whose function has returned in the generation of the last roster."""
        return self.completed.get(self.roster.generation, frozenset()) if self.roster else frozenset()

    def has_completed(self, incarnation: Incarnation) -> bool:
        """Tell whether this member's function has returned; one that is dead must also have ended with 0."""
        end, known = self.dead.get(incarnation), incarnation in self.returners
        if end is None:
            return known
        told = end.stage == "completed" and end.generation in (None, self.roster.generation if self.roster else None)
        return end.status == 0 and (known or told)

    @property
    def vacant(self) -> int:
        """How many ranks have nobody to take them, in the whole world."""
        if self.roster is None and self.policy.shares:
            at = Counter(standby.facts.node for standby in self.standbys.values())
            return sum(max(0, share - at[node]) for node, share in self.policy.shares)
        gaps = len(self.lost) if self.roster else self.policy.world_size
        nodes = self.nodes
        if self.roster is None or nodes is None or gaps == 0:
            return max(0, gaps - len(self.standbys))
        return gaps - fillable((self.members[self.ranks[i]] for i in self.lost), self.standbys, nodes, self.homes)

    @property
    def nodes(self) -> Nodes | None:
        """What is known of nodes, where ranks are given by them."""
        policy = self.policy
        if not policy.by_node or policy.local_world_size is None:
            return None
        return Nodes(self.gone, policy.local_world_size, policy.world_size, policy.whole)

    @property
    def wanting(self) -> int:
        """How many of them the world cannot go on without."""
        return max(0, self.vacant - self.dispensable)

    @property
    def dispensable(self) -> int:
        """How many ranks of the last roster the world may go on without."""
        least = self.policy.min_world_size
        return 0 if self.roster is None or least is None else max(0, self.roster.world_size - least)

    @property
    def wanting_here(self) -> int:
        """How many of the vacant ranks this node should find a process for."""
        if self.vacant == 0:
            return 0
        own = sum(s.facts.node == self.node for s in self.standbys.values())
        if self.roster is None:
            share = self.policy.local_world_size
            gaps = self.policy.world_size if share is None else share
        else:
            gaps = sum(self.roster.members[self.ranks[i]].node == self.node for i in self.lost)
        return min(self.vacant, max(0, gaps - own))


def awaited(world: World) -> Iterator[Incarnation]:
    """Yield the members that have neither arrived nor died; one that is being killed is awaited until it is dead."""
    return _awaited(world, world.ranks)


def staying(world: World) -> Iterator[Incarnation]:
    """Yield those of them that this node may have killed."""
    return (i for i in _awaited(world, world.own) if i not in world.killed)


def _awaited(world: World, whom: Iterable[Incarnation]) -> Iterator[Incarnation]:
    here, killed = world.here, world.killed
    return (i for i in whom if i not in world.lost and (i not in here or i in killed))


def stop_by(world: World) -> float:
    """When members that have not arrived are killed."""
    return (world.since or 0.0) + world.policy.stop_deadline_s


def dirty(world: World) -> list[Incarnation]:
    """Return the members that have arrived with something in them that a fresh process does not have."""
    living = (i for generation, i in world.tainted if generation == world.generation and i not in world.lost)
    return [i for i in living if i in world.ranks]


def accounted(world: World) -> bool:
    """Tell whether every member of the last roster has arrived as good as new, or is dead."""
    enough = len(world.here) + len(world.lost) >= len(world.ranks)  # cheap, and most of the time the answer
    return enough and not dirty(world) and not any(True for _ in awaited(world))


def replace_by(world: World) -> float:
    """When fresh processes in the place of lost ones are awaited no longer."""
    limit_s = world.policy.replace_deadline_s
    if world.roster is None or (limit_s is None and world.wanting):
        return give_up_by(world)
    return min(max(world.since or 0.0, world.bereft) + (limit_s or 0.0), give_up_by(world))


def give_up_by(world: World) -> float:
    """When waiting for processes, deaths, the store (and, while draining, for checkpoints) ends."""
    since, policy = world.since or 0.0, world.policy
    if world.phase is Phase.DRAINING:
        return since + policy.drain_deadline_s
    if world.roster is None:
        return since + policy.start_deadline_s
    limit_s = policy.start_deadline_s
    if world.phase is Phase.GATHERING and any(
        True for _ in awaited(world)
    ):  # SIGKILL does not end who waits in state D
        limit_s = policy.death_deadline_s
    return since + policy.stop_deadline_s + limit_s


def finish_by(world: World) -> float | None:
    """When those that still go on after the end are waited for no longer; None while all have ended well."""
    if all(world.dead[i].status == 0 for i in world.lost):
        return None
    return world.bereft + world.policy.finish_deadline_s


def wake_at(world: World) -> float | None:
    """Return when a driver must step with `Ticked` at the latest; None while no deadline runs."""
    match world.phase:
        case Phase.GATHERING:
            if any(True for _ in staying(world)):
                return stop_by(world)
            return replace_by(world) if world.vacant and accounted(world) else give_up_by(world)
        case Phase.PUBLISHING | Phase.DRAINING:
            return give_up_by(world)
        case Phase.FINISHING:
            return finish_by(world)
        case Phase.RUNNING | Phase.ENDED:
            return None
