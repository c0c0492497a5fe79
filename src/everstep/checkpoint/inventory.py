"""What a directory holds as its tier knows it: which steps are complete, of which worlds, and not trusted.

Taken once when the job begins; from then on kept by what the tier itself commits and gives up. Nothing here decides
what goes (core/retention.py) or is taken up (core/plan.py).
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from everstep.checkpoint.core import names, retention
from everstep.checkpoint.core.findings import Findings, Hurt
from everstep.checkpoint.core.plan import Committed
from everstep.errors import ConfigurationError


class Inventory:
    """Of one tier in one directory."""

    def __init__(self, directory: str, tier: str) -> None:
        self.directory, self.tier = directory, tier
        self.complete: set[int] = set()
        self.sizes: dict[int, int] = {}  # of the worlds that saved them
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.struck: set[int] = set()  # a restore found them damaged
        self.unread: set[int] = set()  # could not be read when the job began, and are not known to be damaged
        self._inherited: frozenset[int] = frozenset()  # by an earlier job, until it is said that we go on from one

    def check(self, wounds: Iterable[Hurt]) -> None:
        """Raise ConfigurationError where there are checkpoints and none is whole."""
        if self.newest is None:
            told = "; ".join(f"step {w.step}: {w.file} {w.reason}" for w in wounds)
            if told:
                raise ConfigurationError(
                    f"no checkpoint in {self.directory} is whole ({told}). Nothing was deleted. To begin from the "
                    "first step, move them away or give another --checkpoint-dir."
                )

    def know(self, findings: Findings) -> None:
        """Take up the complete ones of those that were found; those that proved damaged when they were read are not.

        One that could not be read may be whole: it is there to be restored, and neither counts nor goes.
        """
        wounded = {wound.step for wound in findings.wounds}
        for one in findings.found:
            if one.unread:
                self.unread.add(one.step)
            elif one.complete and one.step not in wounded and one.world_size is not None:
                self.complete.add(one.step)
                self.metrics[one.step] = one.metrics
            if one.world_size is not None and one.step not in wounded:
                self.sizes[one.step] = one.world_size
        self._inherited = frozenset(self.complete)

    def add(self, step: int, world_size: int) -> None:
        """This job has committed `step`."""
        self.complete.add(step)
        self.sizes[step] = world_size
        self.struck.discard(step)
        self.unread.discard(step)

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` lies, or would."""
        return os.path.join(self.directory, names.committed(step))

    @property
    def newest(self) -> int | None:
        """The newest durable step."""
        return max(self.complete, default=None)

    @property
    def highest(self) -> int | None:
        """The newest step that is there, or may be."""
        return max(self.complete | self.unread, default=None)

    @property
    def lost(self) -> str:
        """Say so where there were checkpoints, and all of them have proved damaged: to begin anew is not for us."""
        if not self.complete or not self.complete | self.unread <= self.struck:
            return ""
        steps = ", ".join(map(str, sorted(self.complete, reverse=True)))
        return (
            f"no checkpoint in {self.directory} is whole any more (step {steps}: what is wrong was told before). "
            "Nothing was deleted. To begin from the first step, move them away or give another --checkpoint-dir."
        )

    def committed(self) -> Sequence[Committed]:
        """Checkpoints that are not known to be damaged, newest first, for the plan of a generation's beginning."""
        steps = sorted((self.complete | self.unread) - self.struck, reverse=True)
        return [Committed(step, self.tier, self._where(step), self.sizes.get(step)) for step in steps]

    def _where(self, step: int) -> Mapping[str, object]:
        return {"path": self.path(step), "step": step, "saved_by": self.sizes.get(step)}

    def going(self, keep: retention.Keep, besides: int) -> retention.Decision:
        """Which ones go now, `besides` never: it has just been committed. What is damaged neither counts nor goes."""
        decision = retention.decide(self.complete - self.struck, keep, self.metrics)
        return retention.Decision(tuple(step for step in decision.remove if step != besides), decision.reason)

    def continuing(self, step: int, total: int, world_size: int) -> tuple[str, str] | None:
        """Say once that this job goes on where an earlier one stood: a text and its level."""
        if step not in self._inherited:
            return None
        self._inherited = frozenset()
        path = self.path(step)
        if step < total:
            saved = self.sizes.get(step, world_size)
            other = f" (saved by {saved} ranks, taken up by {world_size})" if saved != world_size else ""
            derived = f"; generators of ranks from {saved} on are derived from rank 0's" if world_size > saved else ""
            return f"continuing from {path}{other}: {step} of {total} steps are done{derived}", "info"
        text = f"{path} is the whole job ({step} steps done, {total} asked for): nothing is left to train"
        return f"{text}; another --checkpoint-dir starts anew, more steps go on from here", "warning"
