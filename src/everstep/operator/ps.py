"""`everstep ps [RUN] [--json]`: the processes of a running job on all of its nodes, and how far each rank is."""

import argparse
import json
import sys
from typing import Any

from everstep.errors import ExitCode
from everstep.operator.asking import ask
from everstep.operator.core.rows import COLUMNS, head, rows, silent
from everstep.operator.finding import HELP, find
from everstep.operator.screen import console, table
from everstep.telemetry import say


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `ps` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ps",
        help="the processes of a running job, and how far each rank is",
        description="Lists the processes of a running job on all of its nodes. Changes nothing.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=HELP)
    parser.add_argument("--json", action="store_true", help="print what the agents have told, as it is")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask, print, and return the exit code: 1 where a node has not answered."""
    told = ask(find(args.run), "/v1/ps")
    if args.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        screen = console()
        screen.print(head(told))
        screen.print(table(COLUMNS, rows(told)))
    if silent(told):
        sys.stdout.flush()
        say(silent(told))
    return ExitCode.FAILED if told["silent"] else ExitCode.DONE
