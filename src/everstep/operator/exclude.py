"""`everstep exclude [RUN] --node NAME [--json]`: leave a node out of a running job."""

import argparse
import json
import sys
from typing import Any

from everstep.errors import ExitCode
from everstep.operator.asking import ask
from everstep.operator.finding import HELP, find


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `exclude` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "exclude",
        help="leave a node out of a running job",
        description="Leaves a node out of a running job, as one whose ranks fault again and again: its processes end, "
        "its agent with exit code 75, and others take its ranks. Refused where too few would be left.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=HELP)
    parser.add_argument("--node", required=True, metavar="NAME", help="as everstep ps names it: node-1")
    parser.add_argument("--json", action="store_true", help="print {node, host}")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask, print, and return the exit code. EverstepError where it stays."""
    told = ask(find(args.run), "/v1/exclude", {"node": args.node})
    if args.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(f"{told['node']} ({told['host']}) is left out\n")
    return ExitCode.DONE
