"""`everstep drain [RUN] [--json]`: end a running job in order: its step ends, its state is made durable."""

import argparse
import json
import sys
from typing import Any

from everstep.errors import ExitCode
from everstep.operator.asking import ask
from everstep.operator.finding import HELP, find


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `drain` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "drain",
        help="end a job in order: its step ends, its state is made durable",
        description="Asks a running job to end on all of its nodes, as SIGTERM to one of its agents does: the step "
        "that runs ends, alike on all ranks, and what is done is made durable within --grace. Does not wait for that.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=HELP)
    parser.add_argument("--json", action="store_true", help="print {draining, grace_s}")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask, print, and return the exit code. EverstepError where it ends already."""
    told = ask(find(args.run), "/v1/drain", {})
    if args.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(f"the job ends: its step, and what makes its state durable, within {told['grace_s']:g} s\n")
    return ExitCode.DONE
