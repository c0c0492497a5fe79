"""The fault flags: of `everstep run` before the script, or of the script itself.

Rule 1: both at once is an error; `everstep run` says by LAUNCHER_ASKED in the workers' environment that it has a plan.
Rule 2: values are checked by the plan's own rules, so that flags, files and calls are refused with the same words.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.errors import UsageError
from everstep.faults.core import codec
from everstep.faults.core.plan import TYPES, Plan, Spec

LAUNCHER_ASKED = "EVERSTEP_FAULTS"
"""Set by `everstep run` for its workers when it was given fault flags."""

_SCRIPT = ("count", "seed", "types", "type-weights", "steps")
_HELP = {
    "count": "inject exactly this many faults",
    "seed": "the plan is a pure function of this number (default 0)",
    "types": f"comma-separated, from {', '.join(TYPES)} (default exception)",
    "type-weights": "comma-separated shares, one for each type (default: all alike)",
    "steps": "steps of the run, where the training loop does not say them",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What `everstep run` was asked to inject: a recipe, or a plan read from a file."""

    spec: Spec | None = None
    plan: Plan | None = None
    save_to: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return what workers must find in their environment."""
        return {LAUNCHER_ASKED: "1"}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fault flags to the parser of `everstep run`; `request_from` reads them."""
    group = parser.add_argument_group("faults", "inject faults by a seeded plan, each once in the life of the job")
    for name in _SCRIPT:
        _add(group, name, help=_HELP[name])
    _add(group, "plan", metavar="FILE", help="replay the plan in FILE")
    group.add_argument(
        "--save-fault-plan", "--save_fault_plan", dest="save_fault_plan", metavar="FILE", help="write the plan to FILE"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fault flags to a script's own parser; parsing them is all that is needed for them to take effect."""
    group = parser.add_argument_group("faults")
    for name in _SCRIPT:
        _add(group, name, help=_HELP[name], action=_Note)


def _add(group: Any, name: str, **options: Any) -> None:
    dashed = f"--fault-{name}"
    group.add_argument(dashed, dashed.replace("-", "_").replace("__", "--"), dest=_dest(name), default=None, **options)


def _dest(name: str) -> str:
    return "fault_" + name.replace("-", "_")


_asked: dict[str, str] = {}
"""What this process's own script was asked for, by destination: one process, one command line."""


class _Note(argparse.Action):
    """Keep the value in the namespace and for `script_spec`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        _asked[self.dest] = str(values)


def forget() -> None:
    """Drop what the script's parser has seen."""
    _asked.clear()


def script_spec() -> Spec | None:
    """Return what the script's own flags asked for. Raises UsageError where `everstep run` has a plan too."""
    spec = spec_from(argparse.Namespace(**_asked))
    if spec is not None and environ.get(LAUNCHER_ASKED):
        raise UsageError(
            "fault flags were given to `everstep run` and to the script as well; give them before the script or after "
            "it, not both"
        )
    return spec


def request_from(args: argparse.Namespace) -> Request | None:
    """Return what the flags of `everstep run` ask for, or None. Raises UsageError for what cannot be meant."""
    save_to = Path(args.save_fault_plan) if args.save_fault_plan else None
    if args.fault_plan:
        if any(getattr(args, _dest(name)) is not None for name in _SCRIPT):
            raise UsageError("--fault-plan is a whole plan; leave the other --fault-… flags out, or leave it out")
        return Request(None, read_stored(Path(args.fault_plan))[0], save_to)
    spec = spec_from(args)
    if spec is None:
        if save_to:
            raise UsageError("--save-fault-plan without a plan: give --fault-count")
        return None
    return Request(spec, None, save_to)


def read_stored(path: Path) -> tuple[Plan, dict[int, float]]:
    """Return the plan in a file, or in the `faults.json` of a run folder, and what was let go. Raises UsageError."""
    path = path / "faults.json" if path.is_dir() else path
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"fault plan {path} cannot be read: {error.strerror}") from error
    return codec.loads(text, str(path))


def spec_from(args: argparse.Namespace) -> Spec | None:
    """Return the recipe that the flags name, or None where no fault is asked for."""
    given = {name: getattr(args, _dest(name), None) for name in _SCRIPT}
    if given["count"] is None:
        lonely = [f"--fault-{name}" for name, value in given.items() if value is not None]
        if lonely:
            raise UsageError(f"{', '.join(lonely)} without --fault-count; say how many faults to inject")
        return None
    types = _parts(given["types"]) if given["types"] is not None else ("exception",)
    weights = tuple(_share(part) for part in _parts(given["type-weights"] or ""))
    steps = None if given["steps"] is None else _whole("steps", given["steps"])
    spec = Spec(_whole("count", given["count"]), _whole("seed", given["seed"] or "0"), types, weights, steps)
    return spec if spec.count else None


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--fault-{name} {text!r}: give a whole number") from None


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--fault-type-weights: {text!r} is not a number; give one a type, as 0.6,0.4") from None


def names() -> Sequence[str]:
    """Return every flag of `everstep run` that belongs to faults, in its dashed spelling."""
    return [*(f"--fault-{name}" for name in _SCRIPT), "--fault-plan", "--save-fault-plan"]
