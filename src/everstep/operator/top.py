"""`everstep top [RUN] [--once] [--json]`: a running job, looked at once a second."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everstep.clock import SYSTEM
from everstep.errors import ExitCode
from everstep.operator.asking import ask
from everstep.operator.core.frame import NODE_COLUMNS, RANK_COLUMNS, TIER_COLUMNS, Frame, frame
from everstep.operator.core.reach import NobodyThere, Reach
from everstep.operator.core.rows import head, silent
from everstep.operator.finding import HELP, find
from everstep.operator.screen import console, table
from everstep.telemetry import say

INTERVAL_S = 1.0
AROUND = 20
"""Lines that what is not a rank may take."""
Told = Mapping[str, Any]


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `top` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="a running job, live: ranks, steps, tiers, faults",
        description="Shows a running job until it ends or you press Ctrl-C. Changes nothing.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=HELP)
    parser.add_argument("--once", action="store_true", help="one look, and the end; so also where this is no terminal")
    parser.add_argument("--json", action="store_true", help="print what the agents have told, a line a look")
    return parser


def run(args: argparse.Namespace) -> int:
    """Look until the job is over; return the exit code: with --once 1 where a node has not answered, else 0."""
    reach = find(args.run)
    if args.once or (not args.json and not sys.stdout.isatty()):
        return _once(reach, as_json=args.json)
    told = ask(reach, "/v1/ps")  # who cannot be asked at all is an error; who ends later is not
    try:
        if args.json:
            _lines(reach, told)
        else:
            _live(reach, told)
    except NobodyThere:
        say("the job is over")
    except KeyboardInterrupt:
        pass
    return ExitCode.DONE


def _once(reach: Reach, *, as_json: bool) -> int:
    told = ask(reach, "/v1/ps")
    if as_json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        console().print(_drawn(told, frame(told, None, 0.0, sys.maxsize)))
    return ExitCode.FAILED if silent(told) else ExitCode.DONE


def _lines(reach: Reach, told: Told) -> None:
    while True:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        SYSTEM.sleep(INTERVAL_S)
        told = ask(reach, "/v1/ps")


def _live(reach: Reach, told: Told) -> None:
    screen = console()
    before: Told | None = None
    asked_s, passed_s = SYSTEM.now(), 0.0
    with Live(console=screen, auto_refresh=False, screen=True) as live:
        while True:
            room = max(5, screen.height - AROUND - len(told["nodes"]))
            live.update(_drawn(told, frame(told, before, passed_s, room)), refresh=True)
            SYSTEM.sleep(INTERVAL_S)
            before, told = told, ask(reach, "/v1/ps")
            now = SYSTEM.now()
            asked_s, passed_s = now, now - asked_s


def _drawn(told: Told, found: Frame) -> Group:
    parts: list[Text | Table] = [Text(head(told), style="bold")]
    parts += [Text(line) for line in (found.pace, found.others and f"beside the ranks: {found.others}") if line]
    if silent(told):
        parts.append(Text(silent(told), style="red"))
    if found.nodes:
        parts += [Text(""), table(NODE_COLUMNS, found.nodes)]
    parts += [Text(""), table(RANK_COLUMNS, found.ranks)]
    if found.more:
        parts.append(Text(f"and {found.more} more ranks, of which none has been silent for longer"))
    if found.tiers:
        parts += [Text(""), table(TIER_COLUMNS, found.tiers)]
    for title, lines in (("faults", found.faults), ("notices", found.notices)):
        if lines:
            parts += [
                Text(""),
                Text(title, style="bold"),
                *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
            ]
    return Group(*parts)
