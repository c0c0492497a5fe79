"""`everstep doctor`: looks at this node before the first job. Exits 1 with a problem, else 0, warnings or not."""

import argparse
import json
import platform
import sys
from typing import Any

from everstep.checkpoint.core.budget import bytes_of
from everstep.doctor.core import findings
from everstep.errors import ExitCode, UsageError
from everstep.telemetry import say


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `doctor` to the subparsers of `everstep`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="look at this node before the first job",
        description="Looks at this node before the first job, and says what to mend. Changes nothing.",
    )
    told = {
        "state": ("40GB", "what the ranks of this node hold together: under DDP the model's state times the ranks"),
        "nproc-per-node": ("N", "ranks of this node (default 1)"),
        "rdzv-endpoint": ("HOST:PORT", "where the nodes of the job will meet"),
        "checkpoint-dir": ("DIR", "where its checkpoints will go"),
    }
    for name, (metavar, text) in told.items():
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        parser.add_argument(*spellings, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="print a list of {level, what, seen, expected, mend}")
    return parser


def run(args: argparse.Namespace) -> int:
    """Look, print, and return the exit code. Raises UsageError for what cannot be meant."""
    ranks = str(args.nproc_per_node or 1)
    if not ranks.isdigit() or not int(ranks):
        raise UsageError(f"--nproc-per-node {ranks}: give the number of ranks, 1 or more.")
    state = None if args.state is None else bytes_of(args.state)
    if platform.system() != "Linux":
        found = [findings.problem("kernel", platform.system(), "Linux", "Start jobs on Linux; reports work here too.")]
    else:
        from everstep.doctor import examine  # noqa: PLC0415 - Linux only, and `--help` stays light without it

        found = examine.examine(examine.asked_of(int(ranks), state, args.rdzv_endpoint, args.checkpoint_dir))
    if args.json:
        sys.stdout.write(json.dumps([one.row() for one in found]) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in findings.lines(found)))
        sys.stdout.flush()
        say(findings.summary(found))
    return ExitCode.FAILED if findings.count(found, findings.Level.PROBLEM) else ExitCode.DONE
