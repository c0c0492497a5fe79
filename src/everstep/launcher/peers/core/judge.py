"""Judges silence for a world whose ranks are watched one by one: the hub holds the last look at every page.

Rule 1: a look ages while it lies here; what was silent when it was taken has been silent for longer now.
Rule 2: nobody is judged before every rank of the running generation has been seen in it, nor after its first fault.
        What was broken in an earlier one may be told late (a victim speaks after its cause), and is no fault of this.
Rule 3: what silence means is said in `launcher.core.limits` alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.launcher.core import limits
from everstep.launcher.core.learned import Learned
from everstep.launcher.peers.core.books import JUMP_S

_OVER = ("Faulted", "Died", "Wedged", "EndRequested", "gone")
_SOON_S = 2.0
"""Looks come once a second: an interpreter that ran when the last one was taken is taken to run until the next."""
Order = tuple[Mapping[str, Any], int]
"""What to tell the watcher of which rank."""


@dataclass
class Judge:
    """See the rules above."""

    own: limits.Own
    learned: Learned = field(default_factory=Learned)
    _views: dict[int, tuple[float, limits.View]] = field(default_factory=dict[int, tuple[float, limits.View]])
    _generation: int = -1
    _members: frozenset[str] = frozenset()
    _running: bool = False
    _looked_s: float | None = None
    _running_s: float = 0.0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Judge":
        """Make one with the limits that rank 0 was given."""
        judge = cls(limits.Own())
        judge.heed(settings)
        return judge

    def heed(self, settings: Mapping[str, Any]) -> None:
        """The limits are these from here on; `hard_s` may be left out."""
        hard_s = settings.get("hard_s")
        self.own = limits.Own(settings["soft_s"], hard_s, settings["first_s"], automatic=settings["automatic"])

    def hear(self, fact: Mapping[str, Any]) -> None:
        """Follow the world, as far as judging needs."""
        if fact["is"] == "Published":
            roster = fact["roster"]
            self._generation = roster["generation"]
            self._members = frozenset(member[1] for member in roster["members"])
            self._running, self._running_s = bool(self._members), 0.0
            self._views.clear()
        elif fact["is"] in _OVER and self._concerned(fact):
            self._running = False

    def _concerned(self, fact: Mapping[str, Any]) -> bool:
        """Tell whether it ends the running generation, and not one before it."""
        if fact["is"] == "Faulted":
            return int(fact["fault"]["generation"]) >= self._generation
        return fact["is"] == "EndRequested" or fact["incarnation"] in self._members

    def take(self, message: Mapping[str, Any], now: float) -> None:
        """Keep a look, and what it teaches."""
        self.teach(message["lessons"])
        if message["generation"] == self._generation:
            view = limits.View(**message["view"])
            self._views[view.rank] = (now, view)

    def teach(self, lessons: Iterable[Sequence[Any]]) -> None:
        """Take in what looks have taught."""
        for what, place, seconds, steps in lessons:
            self.learned = self.learned.taught((what, place, seconds, steps))

    def look(self, now: float) -> list[Order]:
        """Return whom to ask, and whom to call the cause of a hang; to be called about once a second."""
        before, self._looked_s = self._looked_s, now
        self._running_s += 0.0 if before is None else min(now - before, JUMP_S)
        if before is None or now - before > JUMP_S:  # we did not run: nor, it may be, did they
            self._views.clear()
        if not self._running or len(self._views) < len(self._members):
            return []
        views = [_aged(view, now - then) for then, view in self._views.values()]
        self.learned = self.learned.passed(min(view.step for view in views), self._running_s)
        orders: list[Order] = []
        for verdict in limits.judge(views, self.learned, self.own):
            if verdict.action == "probe":
                orders.append(({"kind": "probe"}, verdict.rank))
                continue
            view = self._views[verdict.rank][1]
            limit = limits.limit_of(view, self.learned, self.own)
            if not limit.what:  # a limit of the script's own is not raised
                step = view.step if view.counted else None
                self.learned = self.learned.hung(step, view.place, limit.limit_s, self._running_s)
            self._running = False
            orders.append(({"kind": "condemn", "action": verdict.action, "text": verdict.reason}, verdict.rank))
        return orders


def _aged(view: limits.View, age_s: float) -> limits.View:
    moves = view.moves and age_s < _SOON_S
    still_s = view.still_s if moves else view.still_s + age_s
    return replace(view, silent_s=view.silent_s + age_s, still_s=still_s, monitor_s=view.monitor_s + age_s)
