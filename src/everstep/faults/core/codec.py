"""A plan as JSON and as a table, and what has become of it.

Rule 1: the file says what was asked for beside what follows from it, so that it can be replayed without either.
Rule 2: a plan may be written by hand: `faults` with step, rank, type and position is enough.
Rule 3: a plan is checked as a whole when it is read; a fault that could never hit is an error then.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from everstep.errors import UsageError
from everstep.faults.core.plan import BOUNDARY, MOST, POSITIONS, Plan, PlannedFault, Spec, check_types

VERSION = 1
_PLAN_KEYS = ("version", "asked", "world_size", "steps", "faults", "fired")
_ASKED_KEYS = ("seed", "count", "types", "weights", "steps")
_FAULT_KEYS = ("index", "step", "rank", "type", "position")


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """Return what was asked for."""
    return {
        "seed": spec.seed, "count": spec.count, "types": list(spec.types), "weights": list(spec.weights),
        "steps": spec.steps,
    }  # fmt: skip


def spec_from_json(body: Mapping[str, Any]) -> Spec:
    """Read what `spec_to_json` wrote."""
    return Spec(body["count"], body["seed"], tuple(body["types"]), tuple(body["weights"]), body["steps"])


def rows(faults: Collection[PlannedFault]) -> list[list[int | str]]:
    """Return the short form that travels between processes."""
    return [[f.index, f.step, f.rank, f.type, f.position] for f in faults]


def from_rows(body: Sequence[Sequence[Any]]) -> tuple[PlannedFault, ...]:
    """Read what `rows` wrote."""
    return tuple(PlannedFault(*row) for row in body)


def to_json(plan: Plan, fired: Mapping[int, float] | None = None) -> dict[str, Any]:
    """Return the whole file: the plan, and for each fired fault the wall time at which it was let go."""
    faults = [
        {"index": f.index, "step": f.step, "rank": f.rank, "type": f.type, "position": f.position} for f in plan.faults
    ]
    return {
        "version": VERSION,
        "asked": spec_to_json(plan.spec) if plan.spec else None,
        "world_size": plan.world_size,
        "steps": plan.steps,
        "faults": faults,
        "fired": {str(index): wall for index, wall in sorted((fired or {}).items())},
    }


def dumps(plan: Plan, fired: Mapping[int, float] | None = None) -> str:
    """Return the text of the file."""
    return json.dumps(to_json(plan, fired), indent=1) + "\n"


def loads(text: str, name: str) -> tuple[Plan, dict[int, float]]:
    """Read a plan and its fired faults. Raises UsageError that names the file and the wound."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise TypeError("the file holds no JSON object")
        return _read(cast("dict[str, Any]", body))
    except KeyError as error:
        raise UsageError(
            f"fault plan {name}: {error} is missing; `everstep faults plan --json` shows the form"
        ) from error
    except UsageError as error:
        raise UsageError(f"fault plan {name}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"fault plan {name} cannot be read: {error}; `everstep faults plan --json` shows the form"
        ) from error


def _read(body: dict[str, Any]) -> tuple[Plan, dict[int, float]]:
    if body.get("version", VERSION) != VERSION:
        raise UsageError(f"version {body['version']!r} is not known here; this Everstep reads version {VERSION}")
    _check_keys(body, _PLAN_KEYS, "the plan")
    faults = tuple(_fault(index, one) for index, one in enumerate(body["faults"]))
    if len(faults) > MOST:
        raise UsageError(f"{len(faults)} faults; a plan has at most {MOST}")
    if len({f.index for f in faults}) < len(faults):
        raise UsageError("two faults have the same index; leave `index` out and they are numbered")
    asked = body.get("asked")
    if asked:
        _check_keys(asked, _ASKED_KEYS, "asked")
    plan = Plan(
        tuple(sorted(faults, key=lambda f: (f.step, f.index))),
        spec_from_json(asked) if asked else None,
        body.get("world_size"),
        body.get("steps"),
    )
    fired = {int(index): float(wall) for index, wall in body.get("fired", {}).items()}
    return plan, fired


def _check_keys(body: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse a key that nobody reads: what it was meant to say would not be done."""
    unknown = [str(key) for key in body if key not in known]
    if unknown:
        raise UsageError(
            f"{where}: {', '.join(map(repr, unknown))} is not known here and would be ignored; the keys are "
            f"{', '.join(known)}"
        )


def _fault(index: int, body: Mapping[str, Any]) -> PlannedFault:
    _check_keys(body, _FAULT_KEYS, f"fault {index}")
    fault = PlannedFault(
        int(body.get("index", index)),
        int(body["step"]),
        int(body["rank"]),
        body["type"],
        body.get("position", BOUNDARY),
    )
    check_types([fault.type])
    if fault.position not in POSITIONS:
        raise UsageError(
            f"fault {fault.index}: position {fault.position!r} is not known; choose from {', '.join(POSITIONS)}"
        )
    if fault.step < 1 or fault.rank < 0:
        raise UsageError(f"fault {fault.index}: step {fault.step}, rank {fault.rank}; steps count from 1, ranks from 0")
    return fault


def check_world(plan: Plan, world_size: int) -> None:
    """Raise UsageError where the plan injures a rank that the world does not have."""
    outside = sorted({f.rank for f in plan.faults if f.rank >= world_size})
    if outside:
        raise UsageError(
            f"the fault plan injures rank {', '.join(map(str, outside))}, but ranks run from 0 to {world_size - 1}; "
            "make a plan for this world size"
        )


def table(plan: Plan, fired: Collection[int] = ()) -> str:
    """Return the plan for a person to read."""
    head = [f"{len(plan.faults)} fault{'' if len(plan.faults) == 1 else 's'}"]
    if plan.spec:
        head.append(f"seed {plan.spec.seed}")
    if plan.steps:
        head.append(f"{plan.steps} steps")
    if plan.world_size:
        head.append(f"{plan.world_size} rank{'' if plan.world_size == 1 else 's'}")
    lines = ["fault plan: " + ", ".join(head)]
    if plan.faults:
        lines.append(f"{'#':>4} {'step':>8} {'rank':>6}  {'type':<10} position")
    for f in plan.faults:
        done = "fired" if f.index in fired else ""
        lines.append(f"{f.index:>4} {f.step:>8} {f.rank:>6}  {f.type:<10} {f.position:<10} {done}".rstrip())
    return "\n".join(lines)
