"""`everstep faults plan | show`: make, print and save plans. Needs no torch and no run."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from everstep.errors import UsageError
from everstep.faults import flags
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, plan_of


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `faults` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "faults", help="make and show fault plans", description="Make and show seeded fault plans."
    )
    verbs = parser.add_subparsers(dest="faults_command", required=True, metavar="COMMAND")
    make = verbs.add_parser("plan", help="print the plan that fault flags mean", description=plan_command.__doc__)
    flags.add_run_arguments(make)
    make.add_argument("--world-size", "--world_size", type=int, required=True, metavar="RANKS", help="ranks of the run")
    show = verbs.add_parser("show", help="print a plan from a file or a run folder", description=show_command.__doc__)
    show.add_argument("plan", metavar="FILE", help="a saved plan, or a run folder")
    for verb in (make, show):
        verb.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do what was asked; raises EverstepError for what cannot be meant."""
    return plan_command(args) if args.faults_command == "plan" else show_command(args)


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan that the flags mean in a world of RANKS ranks; --fault-steps says how long the run is."""
    request = flags.request_from(args)
    if request is None:
        raise UsageError("everstep faults plan: say what to inject, with --fault-count or --fault-plan FILE")
    plan = request.plan
    if plan is not None:
        codec.check_world(plan, args.world_size)
    elif request.spec is not None and request.spec.steps is not None:
        plan = plan_of(request.spec, args.world_size, request.spec.steps)
    else:
        raise UsageError("everstep faults plan: a plan depends on the number of steps; add --fault-steps")
    if request.save_to is not None:
        save(plan, request.save_to)
    _print(plan, {}, args.json)
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print a saved plan, and of a run folder's plan which faults have been let go."""
    plan, fired = flags.read_stored(Path(args.plan))
    _print(plan, fired, args.json)
    return 0


def save(plan: Plan, path: Path) -> None:
    """Write the plan for `--fault-plan`. Raises UsageError where the file cannot be written."""
    try:
        path.write_text(codec.dumps(plan))
    except OSError as error:
        raise UsageError(f"--save-fault-plan {path}: {error.strerror}; name a file in a writable folder") from error


def _print(plan: Plan, fired: dict[int, float], as_json: bool) -> None:
    text = json.dumps(codec.to_json(plan, fired), indent=1) if as_json else codec.table(plan, fired)
    sys.stdout.write(text + "\n")
