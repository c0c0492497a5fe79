"""A rank's side of a restore: reads and compares what the keeper names, and writes it when every rank can.

Rule 1: nothing of the live state is written before all of the saved one has been read and verified, on every rank.
Rule 2: random generators last, after everything that draws when it is set (EXPERIMENTS B3).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.core.plan import MEMORY
from everstep.checkpoint.given import Given, in_our_words, unfit
from everstep.checkpoint.keeper_line import KeeperLine
from everstep.checkpoint.load import open_for
from everstep.checkpoint.reading_beside import Beside
from everstep.checkpoint.snapshot import Snapshotter
from everstep.checkpoint.storage.opening import retried
from everstep.checkpoint.tier_client import TierClient
from everstep.checkpoint.tier_settings import GRACE_S
from everstep.checkpoint.unreachable import Retry
from everstep.checkpoint.walk import StateWalk
from everstep.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpoint,
    EverstepError,
    StateMismatch,
    UnreachableStorage,
)

Payload = Callable[[Leaf], bytearray | memoryview]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore took: one line, as a string."""

    step: int
    """The last step that is done in it."""
    tier: str
    """memory, local or disk."""
    age_s: float
    """Seconds since it was taken (memory) or became durable (a directory)."""
    why: str
    """From where, and why nothing newer: what is damaged is named with file and reason."""
    missing: tuple[str, ...] = field(default=())
    """With strict=False: what is not in the saved state, or does not fit, by name and reason; it is as it was."""

    def __str__(self) -> str:
        text = f"restored step {self.step} from {self.tier}, {self.age_s:.1f} s old: {self.why}"
        return f"{text}; missing: {', '.join(self.missing)}" if self.missing else text


def _nothing() -> None:
    return


@dataclass(slots=True)
class _Found:
    """A saved state that was read and verified."""

    walk: StateWalk
    layout: Layout
    payload: Payload
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    close: Callable[[], None] = _nothing
    left_out: list[str] = field(default_factory=list[str])


class Restorer:
    """Leads one restore on this rank."""

    def __init__(
        self,
        line: KeeperLine,
        snapshotter: Snapshotter,
        tiers: Mapping[str, TierClient],
        rank: int,
        world_size: int,
        *,
        allow_pickle: bool = False,
        grace_s: float = GRACE_S,
    ) -> None:
        self._line, self._snapshotter, self._tiers = line, snapshotter, tiers
        self._rank, self._world_size, self._allow_pickle = rank, world_size, allow_pickle
        self._grace_s = grace_s
        self._found: _Found | None = None
        self._beside: Beside | None = None
        self._error: EverstepError | TypeError | None = None

    def restore(self, made: Given, step: int | None, *, strict: bool) -> Restored | None:
        """See `Checkpointer.restore`."""
        self._snapshotter.finish()
        for tier in self._tiers.values():
            tier.rewound()
        try:
            return self._restored(made, step, strict=strict)
        finally:
            self._let_go()

    def _restored(self, made: Given, step: int | None, *, strict: bool) -> Restored | None:
        plan: Mapping[str, Any] = {}
        said = self._line.ask({"kind": "ckpt.restore", "step": step})
        while said["kind"] == "ckpt.plan":
            plan = said
            what, text = self._checked(plan, made, strict=strict)
            self._line.say_again({"kind": "ckpt.checked", "what": what, "text": text})
            said = self._line.answer()
        if said["kind"] != "ckpt.go":
            kind = UnreachableStorage if said["kind"] == "ckpt.unreachable" else CheckpointError
            raise self._error or kind(f"rank {self._rank}: nothing was restored: {said['text']}")
        return self._written(plan, strict=strict)

    def _checked(self, plan: Mapping[str, Any], made: Given, *, strict: bool) -> tuple[str, str]:
        """Read and compare; return what to say of it."""
        self._let_go()
        self._beside = Beside(plan["fds"][0], self._grace_s) if plan["fds"] else None
        self._error = None
        self._snapshotter.begin(self._rank, self._world_size, plan["told"]["snapshot"])
        source = plan["told"]["snapshot"]["restore"]
        try:
            if source is None:
                self._check_that_nothing_is(plan)
            else:
                self._found = self._compared(source, made, strict=strict)
        except DamagedCheckpoint as error:
            if source is not None and source["tier"] != MEMORY:
                self._tiers[source["tier"]].damaged(int(source["step"]), str(error))
            where = "in memory" if source is None or source["tier"] == MEMORY else f"on {source['tier']}"
            return "damaged", f"step {plan['step']} {where} is damaged ({error})"
        except (EverstepError, TypeError) as error:
            self._error = type(error)(in_our_words(str(error)))
            what = "unreachable" if isinstance(error, UnreachableStorage) else "misfit"
            return what, f"rank {self._rank}: {self._error}"
        return "fits", ""

    def _check_that_nothing_is(self, plan: Mapping[str, Any]) -> None:
        if plan["unfit"]:
            raise ConfigurationError(f"nothing can be restored by {self._world_size} ranks: {plan['unfit']}")
        if plan["lost"]:
            raise CheckpointError(f"{plan['lost']}. To begin anew, move it away, or give another directory")

    def _compared(self, source: Mapping[str, Any], made: Given, *, strict: bool) -> _Found:
        """Read and verify all of it, and say what does not fit: StateMismatch, or, not `strict`, what is left out."""
        walk = self._walk(made.objects)
        if source["tier"] == MEMORY:
            memory = self._snapshotter.source()
            assert memory is not None
            found = _Found(walk, *memory)
        else:
            assert self._beside is not None, "a plan from a directory comes with who reads it"
            saved = open_for(source["path"], walk, retried(self._beside, Retry(self._grace_s)))
            found = _Found(walk, saved.layout, saved.bytes_of, saved.refused, saved.close)
            self._found = found  # closed in any case
            saved.prepare()
        wrong = unfit(made, found.layout)
        if not strict:
            objects = {name: thing for name, thing in made.objects.items() if name not in wrong}
            found.walk = self._walk(objects)
            found.left_out = [text for texts in wrong.values() for text in texts]
            return found
        problems = [*walk.problems(found.layout, found.refused), *(text for texts in wrong.values() for text in texts)]
        if problems:
            raise StateMismatch("; ".join(problems))
        return found

    def _walk(self, objects: Mapping[str, Any]) -> StateWalk:
        return StateWalk(objects, rank=self._rank, world_size=self._world_size, allow_pickle=self._allow_pickle)

    def _written(self, plan: Mapping[str, Any], *, strict: bool) -> Restored | None:
        found = self._found
        if found is None:
            return None
        missing = tuple(found.left_out)
        try:
            if strict:
                found.walk.restore(found.layout, found.payload, found.refused)
            else:
                partial = found.walk.restore_what_fits(found.layout, found.payload, found.refused)
                missing += (*partial.missing, *partial.differing)
        except StateMismatch as error:
            raise StateMismatch(in_our_words(str(error))) from error
        found.walk.restore_generators(found.layout, found.payload)
        return Restored(int(plan["step"]), plan["tier"], float(plan["age_s"]), plan["why"], missing)

    def _let_go(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            found.close()
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.close()
