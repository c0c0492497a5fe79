"""What a node that comes while the job runs must hear, so that it steps on with the others: pure.

Rule 1: all that was told since the present roster, that roster before it, and before that what the nodes kept, which
        processes wait, and which of its members are dead. Older facts are void or follow from these.
Rule 2: processes are known by what was told of them: who was announced and has not died, nor gone with its node. A
        node's name may be another's by now, so it is never asked whether a node is here.
Rule 3: before the first roster nothing can be recapitulated: who comes then waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.recovery.core.words import UNKNOWN_STATUS

Fact = Mapping[str, Any]
_VOID = ("came", "gone", "leaves")


@dataclass
class Recap:
    """Hears every fact that is told, in the order in which it is told."""

    generation: int = -1
    """Of the present roster; before the first: -1."""
    _home: dict[str, str] = field(default_factory=dict[str, str])  # the node of each process that lives
    _announced: dict[str, Fact] = field(default_factory=dict[str, Fact])  # of those that live
    _deaths: dict[str, Fact] = field(default_factory=dict[str, Fact])  # of members of the present roster
    _members: dict[str, str] = field(default_factory=dict[str, str])  # of it, with their nodes
    _kept: list[Fact] = field(default_factory=list[Fact])  # of generations that are open
    _roster: Fact | None = None
    _since: list[Fact] = field(default_factory=list[Fact])

    @property
    def possible(self) -> bool:
        """There is a roster to begin from."""
        return self._roster is not None

    def hear(self, fact: Fact) -> None:
        """A fact is told."""
        match fact["is"]:
            case "Announced":
                self._home[fact["incarnation"]] = fact["facts"]["node"]
                self._announced[fact["incarnation"]] = fact
            case "Died":
                self._died(fact["incarnation"], fact)
            case "gone":
                for who in [who for who, node in self._home.items() if node == fact["node"]]:
                    self._died(who, _death(who))
            case "kept":
                self._kept.append(fact)
            case "Published" if fact["roster"]["members"]:
                self._enter(fact)
            case _:
                if fact["is"] not in _VOID:
                    self._since.append(fact)

    def _died(self, who: str, death: Fact) -> None:
        self._home.pop(who, None)
        self._announced.pop(who, None)
        if who in self._members:
            self._deaths.setdefault(who, death)

    def _enter(self, fact: Fact) -> None:
        roster = fact["roster"]
        self._members = {member[1]: member[2] for member in roster["members"]}
        self._roster, self.generation = fact, int(roster["generation"])
        self._deaths = {who: _death(who) for who in self._members if who not in self._home}
        for who in self._home.keys() & self._members.keys():
            self._announced.pop(who, None)
        self._kept = [kept for kept in self._kept if int(kept["generation"]) >= self.generation]
        self._since = [one for one in self._since if _generation_of(one) >= self.generation]

    def told(self, present: Mapping[str, str]) -> list[Fact]:
        """Return the facts for a node that comes now, in order. Its view begins with generation `generation`.

        `present`: who is here.
        """
        assert self._roster is not None, "see `possible`"
        last = {self._members[who]: who for who in self._deaths}
        lost = {who: node for node, who in last.items() if node not in present}
        deaths = [{**death, "gone": lost.get(who, "")} for who, death in self._deaths.items()]
        before = [kept for kept in self._kept if int(kept["generation"]) == self.generation]
        after = [kept for kept in self._kept if int(kept["generation"]) > self.generation]
        return [*self._announced.values(), *deaths, *before, self._roster, *self._since, *after]


def _death(who: str) -> Fact:
    return {
        "is": "Died", "incarnation": who, "status": UNKNOWN_STATUS, "stage": "running", "step": None,
        "generation": None, "unasked": False, "gone": "",
    }  # fmt: skip


def _generation_of(fact: Fact) -> int:
    """Of what a fact speaks; what ends the job speaks of all."""
    if fact["is"] == "Faulted":
        return int(fact["fault"]["generation"])
    if fact["is"] == "Published":
        return int(fact["roster"]["generation"])
    if fact["is"] == "Arrived":  # for the next one
        return int(fact["generation"]) - 1
    if fact["is"] in ("Completed", "drained"):
        return int(fact["generation"])
    return 1 << 62 if fact["is"] == "EndRequested" else -1
