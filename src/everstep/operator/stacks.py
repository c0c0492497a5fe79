"""`everstep stacks [RUN] [--json] [--threads]`: where each rank of a running job stands, the same stacks told once."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.errors import ExitCode
from everstep.operator.asking import ask
from everstep.operator.core.groups import groups, lines, place
from everstep.operator.core.rows import plain, silent
from everstep.operator.finding import HELP, find
from everstep.telemetry import say


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `stacks` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "stacks",
        help="where each rank of a running job stands in Python",
        description="Shows the Python stack of each rank of a running job, ranks that stand at one place together, "
        "those that others wait for first. No rank is stopped or signalled for it.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=HELP)
    parser.add_argument("--threads", action="store_true", help="show the other threads of each rank too")
    parser.add_argument("--json", action="store_true", help="print {groups, ranks, silent}")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask, print, and return the exit code: 1 where a node has not answered."""
    told = ask(find(args.run), "/v1/stacks", long=True)
    ranks = [rank | {"node": node["node"]} for node in told["nodes"] for rank in node["ranks"]]
    found = groups(ranks)
    if args.json:
        body = {"groups": [group.to_json() for group in found], "ranks": ranks, "silent": told["silent"]}
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        text = [line for group in found for line in (*lines(group, found), "")]
        text += [line for rank in ranks for line in _others(rank)] if args.threads else []
        sys.stdout.write("\n".join(text or ["no rank has begun"]) + "\n")
    if silent(told):
        sys.stdout.flush()
        say(silent(told))
    return ExitCode.FAILED if told["silent"] else ExitCode.DONE


def _others(rank: Mapping[str, Any]) -> list[str]:
    """The other threads of a rank."""
    threads: Sequence[Mapping[str, Any]] = [thread for thread in rank["threads"] if not thread["first"]]
    told: list[str] = []
    for thread in threads:
        told += [f"rank {rank['rank']}, thread {plain(thread['name'])}"]
        told += [place(*frame) for frame in thread["frames"]]
        told.append("")
    return told
