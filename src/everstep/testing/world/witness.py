"""What one agent has heard and ordered, kept beside it, and what it therefore owes.

Rule: this follows from the protocol's promises, not from the agent's state, so that a fact that an agent has forgotten
or an order that it has left out shows at once, and not only in the rare run in which nobody else makes up for it.
"""

from collections.abc import Iterable, Iterator, Mapping

from everstep.recovery.core import guards
from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Completed,
    Died,
    EndRequested,
    Event,
    Fault,
    Faulted,
    Incarnation,
    Published,
    Roster,
    Wedged,
)
from everstep.recovery.core.world import Phase

Key = tuple[int, Incarnation]


class Witness:
    """The memory of one agent's driver."""

    def __init__(self, node: str, ranks: int, least: int | None = None) -> None:
        self.node, self.ranks, self.least = node, ranks, least
        self.rosters: dict[int, Roster] = {}  # heard to have won
        self.announced: dict[Incarnation, str] = {}  # with the node of each
        self.arrivals: dict[Key, bool] = {}  # whether it came back clean
        self.completions: set[Key] = set()
        self.deaths: dict[Incarnation, Died] = {}
        self.faults: list[Fault] = []
        self.failures = 0  # of fresh processes, since a roster was last opened or entered
        self.end_wanted = False
        # Orders.
        self.killed: set[Incarnation] = set()
        self.reports: dict[int, list[Fault]] = {}
        self.given: set[tuple[type, int]] = set()  # orders that come once a generation
        self.entered = -1
        self.finished = False
        self.opened_s = 0.0
        self.stands = Phase.GATHERING  # where its orders say that it is

    def __str__(self) -> str:
        return f"agent {self.node}"

    def hear(self, event: Event) -> None:
        """Keep what was said; first news counts."""
        match event:
            case Faulted(fault):
                self.faults.append(fault)
            case Published(roster):
                self.rosters[roster.generation] = roster
            case EndRequested():
                self.end_wanted = True
            case _:
                self._hear_of_process(event)

    def _hear_of_process(self, event: Event) -> None:
        match event:
            case Announced(who, facts):
                self.announced.setdefault(who, facts.node)
            case Arrived(generation, who, facts):
                self.arrivals.setdefault((generation, who), not facts.dirt)
            case Completed(generation, who):
                self.completions.add((generation, who))
            case Died(who):
                unused = event.stage == "fresh" and who not in self.members
                self.failures += unused and event.status != 0 and who not in self.deaths
                self.deaths.setdefault(who, event)
            case _:
                return

    @property
    def members(self) -> Mapping[Incarnation, int]:
        """The ranks of the roster entered last."""
        roster = self.rosters.get(self.entered)
        return {m.incarnation: m.rank for m in roster.members} if roster else {}

    def owes(self, phase: Phase) -> Iterator[str]:
        """Yield what this agent should have done by now, standing where it does."""
        if phase is Phase.ENDED:
            return
        if self.end_wanted:
            yield "the end that was asked for"
        if self.entered + 1 in self.rosters and not self.finished:
            yield f"to act on the roster of generation {self.entered + 1}"
        if phase is Phase.GATHERING:
            yield from self._gathering()
        if phase in (Phase.RUNNING, Phase.DRAINING):
            yield from self._running()
        if phase is Phase.RUNNING and all(self._is_through(i) for i in self.members):
            yield "to drain: all have completed"

    def _gathering(self) -> Iterator[str]:
        members, after = self.members, self.entered + 1
        gaps = sum(i in self.deaths for i in members) if members else self.ranks
        enough = gaps <= len(list(self._standbys()))
        if enough and all(
            i in self.deaths or (self.arrivals.get((after, i)) and i not in self.killed) for i in members
        ):
            yield f"a roster for generation {after}: everybody is accounted for"
        left = len(members) - gaps + len(list(self._standbys()))
        may_shrink = self.least is not None and members and left >= min(self.least, len(members))
        if not enough and not may_shrink and self.failures >= guards.FALSE_STARTS:
            yield "to give up: fresh processes fail"

    def _standbys(self) -> Iterable[Incarnation]:
        held = {m.incarnation for g, roster in self.rosters.items() if g <= self.entered for m in roster.members}
        return (i for i in self.announced if i not in held and i not in self.deaths and i not in self.killed)

    def _running(self) -> Iterator[str]:
        members = self.members
        if any(f.generation == self.entered and f.incarnation in members for f in self.faults):
            yield f"to leave generation {self.entered}: it has a fault"
        if any(i in self.deaths and not self._is_through(i) for i in members):
            yield f"to leave generation {self.entered}: a member is dead"

    def _is_through(self, who: Incarnation) -> bool:
        death = self.deaths.get(who)
        completed = (self.entered, who) in self.completions
        if death is None:
            return completed
        told = death.stage == "completed" and death.generation == self.entered
        return death.status == 0 and (completed or told)

    def open_question(self, event: Died | Wedged) -> bool:
        """Tell whether this explains an exception of somebody else, which was reported first."""
        who, told = event.incarnation, self.reports.get(self.entered, [])
        if [f.victim for f in told] != [True] or told[0].incarnation == who or who not in self.members:
            return False
        return who not in self.deaths and who not in self.killed and (self.entered + 1, who) not in self.arrivals

    def must_kill(self, event: Event) -> bool:
        """Tell whether this says that a process of ours cannot hear us, for the first time."""
        if not isinstance(event, Wedged) or event.incarnation in self.killed or event.incarnation in self.deaths:
            return False
        return self.announced.get(event.incarnation) == self.node
