"""One restore of all ranks, as the keeper leads it: one source for all, read and compared by each before any writes.

all ranks ask ──▶ a plan ──▶ each reads, verifies and compares ──▶ all can: go
                    ▲                    │ one finds damage: struck out
                    └────────────────────┘ one cannot take it: misfit, for all, and nothing was written
                                           one cannot read it now: unreachable, for all; nothing older is taken for it
"""

from collections.abc import Mapping
from typing import Any

from everstep.checkpoint.core.plan import MEMORY, Plan
from everstep.checkpoint.keeper_host import KeeperHost

_WORSE_FIRST = ("misfit", "damaged", "unreachable")


class Restoring:
    """Of one keeper; one at a time."""

    def __init__(self, host: KeeperHost) -> None:
        self._host = host
        self._asked: dict[int, Mapping[str, Any]] = {}
        self._checked: dict[int, Mapping[str, Any]] = {}
        self._away: dict[int, str] = {}
        self._struck: list[str] = []

    def away(self, rank: int, why: str) -> None:
        """A rank is gone: the others cannot restore without it."""
        self._away[rank] = why
        if self._asked:
            self._misfit(f"rank {rank} {why}")

    def asked(self, rank: int, message: Mapping[str, Any]) -> None:
        """A rank wants to restore."""
        self._asked[rank] = message
        if self._away:
            gone, why = next(iter(self._away.items()))
            self._misfit(f"rank {gone} {why}")
        elif len(self._asked) == self._host.world_size:
            self._struck.clear()
            self._plan()

    def checked(self, rank: int, message: Mapping[str, Any]) -> None:
        """A rank has read what the plan says, or could not."""
        if rank not in self._asked:
            return
        self._checked[rank] = message
        if len(self._checked) < self._host.world_size:
            return
        checked = [one for _, one in sorted(self._checked.items())]
        said = {what: [one["text"] for one in checked if one["what"] == what] for what in _WORSE_FIRST}
        if said["misfit"]:
            self._misfit("; ".join(said["misfit"]))
        elif said["damaged"]:
            self._struck += dict.fromkeys(said["damaged"])
            self._plan()
        elif said["unreachable"]:
            self._misfit("; ".join(said["unreachable"]), unreachable=True)
        else:
            self._go()

    def _plan(self) -> None:
        self._checked.clear()
        steps = {message["step"] for message in self._asked.values()}
        step = next(iter(steps))
        if len(steps) > 1:
            self._misfit(f"the ranks ask for different steps: {sorted(map(str, steps))}")
            return
        there = self._there()
        if step is not None and step not in there:
            struck = f"; not any more: {'; '.join(self._struck)}" if self._struck else ""
            known = ", ".join(map(str, sorted(there))) or "none"
            self._misfit(f"there is no step {step} to restore; there are: {known}{struck}")
            return
        told = self._host.enter(step)
        plan = self._host.shelf.plan
        assert plan is not None
        found = [one for tier in self._host.tiers for one in (*tier.wounds, *tier.unread)]
        newer = [text for at, text in found if at > (plan.step or 0)]
        why = "; ".join([plan.reason, *newer, *self._struck])
        lost = "" if plan.step is not None or plan.unfit else self._lost()
        body = {"kind": "ckpt.plan", "step": plan.step, "tier": plan.tier, "age_s": self._age(plan), "why": why}
        for rank, message in self._asked.items():
            answer = {**body, "ask": message["ask"], "told": told[rank], "unfit": plan.unfit, "lost": lost}
            if plan.step is None or plan.tier == MEMORY:
                self._host.send(rank, answer)
            else:
                self._host.reader(rank, answer)

    def _lost(self) -> str:
        """Say what is there and damaged, all of it: to begin anew is not for us."""
        found = dict.fromkeys([*(text for tier in self._host.tiers for _, text in tier.wounds), *self._struck])
        return f"nothing that is saved is whole ({'; '.join(found)}); nothing was deleted" if found else ""

    def _there(self) -> set[int]:
        """Steps that every rank can have."""
        found = {one.step for tier in self._host.tiers for one in tier.committed()}
        ranks = range(self._host.world_size)
        sealed = [{s.step for s in self._host.shelf.sealed() if s.rank == rank} for rank in ranks]
        return found | set.intersection(*sealed)

    def _age(self, plan: Plan) -> float:
        """Seconds since the state was taken (memory) or became durable; 0 where it cannot be told.

        By the monotonic clock: the time of day counts only for how old a checkpoint was when the directory was taken.
        """
        now = self._host.clock.now()
        if plan.tier == MEMORY:
            taken = [self._host.taken_s[source] for source in plan.sources.items() if source in self._host.taken_s]
            return round(now - min(taken, default=now), 3)
        if plan.committed is None:
            return 0.0
        tier = next(one for one in self._host.tiers if one.tier == plan.tier)
        return round(now - tier.durable_s.get(plan.committed.step, now), 3)

    def _go(self) -> None:
        plan = self._host.shelf.plan
        for tier in self._host.tiers:
            tier.went_back(None if plan is None else plan.step)
        for rank, message in self._asked.items():
            self._host.send(rank, {"kind": "ckpt.go", "ask": message["ask"]})
        self._asked.clear()
        self._checked.clear()

    def _misfit(self, text: str, *, unreachable: bool = False) -> None:
        kind = "ckpt.unreachable" if unreachable else "ckpt.misfit"
        for rank, message in self._asked.items():
            self._host.send(rank, {"kind": kind, "ask": message["ask"], "text": text})
        self._asked.clear()
        self._checked.clear()
