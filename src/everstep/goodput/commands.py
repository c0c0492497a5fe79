"""`everstep report RUN… [--html FILE] [--json] [--twin RUN]`.

Exit code 0 where every second has its place; 1 where the ledger does not close or cannot be read; 64 for a folder that
is none of ours.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from everstep.errors import ConfigurationError, EverstepError, ExitCode, UsageError
from everstep.goodput import report
from everstep.goodput.core.accounting import Ledger
from everstep.goodput.log import newest_run
from everstep.goodput.summary import to_json
from everstep.goodput.tables import tables
from everstep.telemetry import say

if TYPE_CHECKING:
    # argparse has no public name for it
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def add_parser(subparsers: "Subparsers") -> None:
    """Add `report` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="what a run spent its time on, and what each fault cost",
        description="Account for every second of a run, from the event log in its folder.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", type=Path, help="run folder; left out: the newest under ./everstep-runs"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report as one self-contained page")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON; a list where several runs are told"
    )
    parser.add_argument(
        "--twin",
        metavar="RUN",
        type=Path,
        help="fault-free run of the same job: its median step is the fault-free step",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `everstep report` and return the exit code."""
    try:
        return _report(args.runs or [newest_run()], html=args.html, as_json=args.json, twin=args.twin)
    except EverstepError as error:
        say(f"report: {error}")
        return int(error.exit_code)


def _report(runs: Sequence[Path], *, html: Path | None, as_json: bool, twin: Path | None) -> int:
    if html is not None and len(runs) > 1:
        raise UsageError(f"--html tells one run, but {len(runs)} were given; call it once for each")
    ledgers = [(folder, report.load(folder, twin=twin)[0]) for folder in runs]
    if as_json:
        told: list[dict[str, Any]] = [to_json(ledger) for _, ledger in ledgers]
        sys.stdout.write(json.dumps(told[0] if len(told) == 1 else told, indent=2) + "\n")
    else:
        _print(ledgers)
    if html is not None:
        _write(ledgers[0], html)
    return int(ExitCode.FAILED if any(ledger.errors for _, ledger in ledgers) else ExitCode.DONE)


def _print(ledgers: Sequence[tuple[Path, Ledger]]) -> None:
    console = Console(highlight=False)
    for folder, ledger in ledgers:
        console.print(tables(ledger, str(folder), console.width))


def _write(told: tuple[Path, Ledger], html: Path) -> None:
    folder, ledger = told
    try:
        report.draw(ledger, folder.resolve().name, html)
    except OSError as error:
        raise ConfigurationError(f"{html} cannot be written: {error}; name a file in a folder that exists") from error
    say(f"report: {html} written")
