"""Which fault hits which rank at which step, as a pure function of its arguments.

Rule 1: a plan depends on seed, count, types, weights, world size and number of steps alone; every process that knows
        them makes the same plan, on every version of Python (only `Random.random` is drawn from, which is guaranteed).
Rule 2: exactly `count` faults, spread over the run: one from each stratum, MARGIN steps away from both ends, GAP steps
        apart, so that each is survived before the next one comes. A plan that does not fit is an error, never a
        shorter plan.
Rule 3: shares are drawn by systematic sampling: every type comes its expected number of times, rounded down or up.
Rule 4: the shape covers what must be survived: rank 0 from two faults on, the three places inside a step from three on.

Not known here: whether a fault has been fired (`faults.companion`), and what a type does (`faults.injectors`).
Rejected: drawing each step and type independently (faults land in the same step; five draws from three types leave one
out in four seeds of ten), and sparing rank 0 (survivors of a dead rank 0 are the case that matters).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from everstep.errors import UsageError

T = TypeVar("T")

TYPES = {
    "exception": "raises RuntimeError in the function",
    "memory": "raises MemoryError in the function",
    "hang": "sleeps for ever",
    "lock": "waits for ever for a lock",
    "queue": "waits for ever for an item of a queue",
    "socket": "waits for ever for data from a socket",
    "child": "waits for ever for a child process",
    "sigkill": "the process kills itself with SIGKILL",
    "sigterm": "the process gets SIGTERM",
    "sigstop": "the process is stopped by SIGSTOP",
    "segfault": "reads address 0",
    "abort": "calls abort(3)",
    "exit": "leaves with os._exit(1)",
    "gil": "sleeps for ever in C with the interpreter lock held",
}
"""Every type of fault, by the name that flags and files use, and what it does."""

FORWARD, BACKWARD, OPTIMIZER, BOUNDARY = POSITIONS = ("forward", "backward", "optimizer", "boundary")
"""Where in the step: inside forward; inside backward; after this rank's optimizer.step() and before its peers'; between
two steps, before the named one."""

INSIDE = (FORWARD, BACKWARD, OPTIMIZER)
MARGIN = 3  # steps at either end of the run that are never hit
GAP = 4  # steps from one fault to the next, at the least
MOST = 1000  # faults in one plan: what one message between processes holds


@dataclass(frozen=True, slots=True, order=True)
class PlannedFault:
    """One fault. Steps count from 1."""

    index: int
    step: int
    rank: int
    type: str
    position: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What was asked for, before the world and the number of steps are known."""

    count: int
    seed: int = 0
    types: tuple[str, ...] = ("exception",)
    weights: tuple[float, ...] = ()  # none: all types alike
    steps: int | None = None  # None: what the training loop says

    def __post_init__(self) -> None:
        check_types(self.types)
        check_weights(self.types, self.weights)
        if not 0 <= self.count <= MOST:
            raise UsageError(f"--fault-count {self.count}: a plan has 0 to {MOST} faults")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--fault-steps {self.steps}: give the number of steps of the run, at least 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """All faults of a job in order of their steps. `spec` is None where the plan was written by hand."""

    faults: tuple[PlannedFault, ...]
    spec: Spec | None = None
    world_size: int | None = None
    steps: int | None = None


def check_types(types: Sequence[str]) -> None:
    """Raise UsageError for a type that nobody knows, naming those that are known."""
    unknown = [name for name in types if name not in TYPES]
    if unknown or not types:
        wrong = ", ".join(map(repr, unknown)) or "nothing at all"
        raise UsageError(f"fault types: {wrong} is not known; choose from {', '.join(TYPES)}")
    twice = sorted({name for name in types if list(types).count(name) > 1})
    if twice:
        raise UsageError(f"fault types: {', '.join(twice)} is named more than once; give it a greater weight instead")


def check_weights(types: Sequence[str], weights: Sequence[float]) -> None:
    """Raise UsageError for weights that do not belong to the types, or that cannot be shares."""
    if not weights:
        return
    shown = ",".join(f"{w:g}" for w in weights)
    if len(weights) != len(types):
        raise UsageError(
            f"fault type weights {shown}: {len(weights)} weights for {len(types)} types ({', '.join(types)}); "
            "give one weight a type, in the same order"
        )
    if any(w < 0 or not math.isfinite(w) for w in weights):
        raise UsageError(f"fault type weights {shown}: a weight is a finite number, 0 or greater")
    if not sum(weights):
        raise UsageError(f"fault type weights {shown}: all are 0, so no type can be chosen; give one a weight above 0")


def most_that_fit(steps: int) -> int:
    """Return how many faults a run of `steps` steps holds under rule 2."""
    usable = steps - 2 * MARGIN
    return 0 if usable < 1 else (usable - 1) // GAP + 1


def plan(
    seed: int, count: int, types: Sequence[str], weights: Sequence[float], world_size: int, steps: int
) -> Plan:  # fmt: skip
    """Return the plan. Raises UsageError where the arguments cannot be meant or the faults do not fit into `steps`."""
    spec = Spec(count, seed, tuple(types), tuple(weights))
    return plan_of(spec, world_size, steps)


def plan_of(spec: Spec, world_size: int, steps: int) -> Plan:
    """Return the plan that `spec` means in a world of `world_size` ranks and a run of `steps` steps."""
    if world_size < 1:
        raise UsageError(f"a fault plan for {world_size} ranks: a world has at least 1")
    if spec.count > most_that_fit(steps):
        raise UsageError(
            f"{spec.count} faults do not fit into {steps} steps: at most {most_that_fit(steps)} do, {GAP} steps apart "
            f"and {MARGIN} away from both ends. Train for more steps, or lower --fault-count."
        )
    draw = random.Random(f"everstep fault plan 1: {spec.seed}")  # a string, since Random(-1) is Random(1)
    rows = zip(
        _steps(draw, spec.count, steps),
        _ranks(draw, spec.count, world_size),
        _types(draw, spec),
        _positions(draw, spec.count),
        strict=True,
    )
    faults = tuple(PlannedFault(index, *row) for index, row in enumerate(rows))
    return Plan(faults, spec, world_size, steps)


def _below(draw: random.Random, n: int) -> int:
    return int(draw.random() * n)


def _shuffled(draw: random.Random, items: Sequence[T]) -> list[T]:
    rest = list(items)
    return [rest.pop(_below(draw, len(rest))) for _ in items]


def _steps(draw: random.Random, count: int, steps: int) -> list[int]:
    """Draw one step from each of `count` strata, pushed to the right where it would come too soon after the last."""
    usable = steps - 2 * MARGIN
    found: list[int] = []
    for i in range(count):
        low, high = usable * i // count, usable * (i + 1) // count  # this stratum, its end not included
        soonest = max(low, found[-1] + GAP) if found else low
        latest = min(high, usable - GAP * (count - 1 - i))  # leaves room for those that follow
        found.append(soonest + _below(draw, max(1, latest - soonest)))
    return [MARGIN + 1 + place for place in found]


def _ranks(draw: random.Random, count: int, world_size: int) -> list[int]:
    """Every rank once before any comes again; rank 0 among them from two faults on."""
    ranks: list[int] = []
    while len(ranks) < count:
        ranks += _shuffled(draw, range(world_size))
    del ranks[count:]
    if count > 1 and 0 not in ranks:
        ranks[_below(draw, count)] = 0
    return ranks


def _types(draw: random.Random, spec: Spec) -> list[str]:
    weights = spec.weights or (1.0,) * len(spec.types)
    shares = [(name, weight / sum(weights)) for name, weight in zip(spec.types, weights, strict=True) if weight]
    edges: list[float] = []
    for _, share in shares:
        edges.append((edges[-1] if edges else 0.0) + share)
    start = draw.random()
    points = [(i + start) / max(1, spec.count) for i in range(spec.count)]
    last = len(shares) - 1
    return _shuffled(draw, [shares[min(last, sum(edge <= point for edge in edges))][0] for point in points])


def _positions(draw: random.Random, count: int) -> list[str]:
    positions: list[str] = []
    while len(positions) < count:
        positions += [*_shuffled(draw, INSIDE), BOUNDARY]
    return _shuffled(draw, positions[:count])
