"""`everstep kill [RUN] (--rank N… | --job) [--json]`: end the process of a rank, or the job, at once."""

import argparse
import json
import sys
from typing import Any

from everstep.errors import EverstepError, ExitCode, UsageError
from everstep.operator.asking import ask
from everstep.operator.finding import HELP, find
from everstep.ranks import parse
from everstep.telemetry import say


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `kill` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "kill",
        help="end the process of a rank, or a job, at once",
        description="Ends processes of a running job with SIGKILL. A rank's end is a fault like any other: it is "
        "replaced, and counts as a restart. A job's end is exit code 93 of its agents, without a last checkpoint.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rank", metavar="N", help="a rank, or several: 3, or 0,4-7")
    what.add_argument("--job", action="store_true", help="the job itself, on all nodes")
    parser.add_argument("--json", action="store_true", help="print what was ended, a line each")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask, print, and return the exit code: 1 where one was not ended."""
    wishes = [{"job": True}] if args.job else [{"rank": rank} for rank in _ranks(args.rank)]
    reach, failed = find(args.run), False
    for wish in wishes:
        try:
            told = ask(reach, "/v1/kill", wish)
        except UsageError:
            raise
        except EverstepError as error:
            say(str(error))
            failed = True
            continue
        if args.json:
            sys.stdout.write(json.dumps(told) + "\n")
        else:
            what = (
                "the job is ending"
                if args.job
                else f"rank {told['rank']} (pid {told['pid']} on {told['node']}) is killed"
            )
            sys.stdout.write(what + "\n")
    return ExitCode.FAILED if failed else ExitCode.DONE


def _ranks(text: str) -> list[int]:
    try:
        found = sorted(parse(text))
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"--rank {text}: give ranks as 3 or 0,4-7.")
    return found
