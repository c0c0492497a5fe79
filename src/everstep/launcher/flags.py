"""`everstep run`'s flags: torchrun's own parser, and what we add to it.

Runs in the zygote, which has torch; the agent gets the result as JSON. Every flag is heard with dashes and with
underscores, and from `PET_<NAME>` where torch's are.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch.distributed.argparse_util import env
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from everstep.errors import UsageError
from everstep.launcher.core.slurm import fill
from everstep.launcher.core.unlike import refuse
from everstep.launcher.nodes.core.lemon import MOST, WITHIN_S


class _Parser(argparse.ArgumentParser):
    """Turns argparse's exit into an error that the agent prints: a wrong flag is exit code 64."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nSee `{self.prog} --help`.")


def _spellings(name: str) -> tuple[str, ...]:
    return (f"--{name}", f"--{name.replace('-', '_')}") if "-" in name else (f"--{name}",)


Finish = Callable[[dict[str, Any]], None]
"""Reads what a feature's flags were given, once the command line stands. May raise UsageError."""


def build(extensions: Sequence[str]) -> argparse.ArgumentParser:
    """Return torch's parser with our flags added; `extensions` are `module:function` that add a feature's own."""
    return _built(extensions)[0]


def _built(extensions: Sequence[str]) -> tuple[argparse.ArgumentParser, list[Finish]]:
    """Return the parser, and what the features want to do with what it has read, in their order."""
    parser: argparse.ArgumentParser = get_args_parser()
    parser.__class__ = _Parser
    parser.prog = "everstep run"
    parser.allow_abbrev = False
    parser.description = "Start one worker a rank, keep spares warm, and keep the job stepping through faults."
    # Not torch's own defaults: 3 and 0 restarts, and up to 2.12 the port 29500, which only one job of a node can have;
    # node rank 0, which a node that was given none must not take for its own.
    given = {name: os.environ.get(f"PET_{name.upper()}") for name in ("max_restarts", "master_port", "node_rank")}  # noqa: TID251 - torch's own convention
    parser.set_defaults(**given)
    _explain(parser)
    group = parser.add_argument_group("everstep")

    def add(name: str, **settings: Any) -> None:
        group.add_argument(*_spellings(name), action=env, **settings)

    add("spares", type=int, default=None, help="Warm workers without a rank, ready to take one over (default 1).")
    add(
        "spare-nodes",
        type=int,
        default=0,
        help="Nodes beyond those of --nnodes that wait, their processes warm, and take the ranks of a lost one.",
    )
    add(
        "health-check",
        type=str,
        default=None,
        help="A command that each node runs before it joins; where it fails that node ends with code 75, others go on.",
    )
    add(
        "lemon-faults",
        type=int,
        default=MOST,
        help="Faults of one node's ranks within --lemon-window that have it left out, where others can do without it "
        "(default 3; 0: never).",
    )
    add("lemon-window", type=float, default=WITHIN_S, help="Seconds (default 3600).")
    add(
        "min-world-size",
        type=int,
        default=None,
        help="Go on with so few ranks where a lost one is not replaced (default: the world keeps its size). State that "
        "run.steps keeps is resharded; where it means nothing with fewer ranks the job ends with code 75.",
    )
    add(
        "replacement-timeout",
        type=float,
        default=None,
        help="Seconds that a new process in a lost rank's place is awaited, 0: only a spare that is there. Then "
        "the world shrinks where it may, else the job ends with code 75 (default 60 with --min-world-size, else 600).",
    )
    add(
        "grace",
        type=float,
        default=None,
        help="Seconds between asking everything to end and SIGKILL (default 15, or what --shutdown-timeout says).",
    )
    add(
        "gpu-memory-reclaim-timeout",
        type=float,
        default=50.0,
        help="Most seconds for which an unwrapped script's next attempt waits for memory of its GPU that is being "
        "freed; 0 does not look (default 50).",
    )
    add("gpu-memory-tolerance-mb", type=float, default=512.0, help="So much of it in use counts as free (default 512).")
    add(
        "death-timeout",
        type=float,
        default=None,
        help="Seconds for which the death of a killed rank is awaited: SIGKILL does not end who waits inside the "
        "kernel. Then the job ends with code 75, and nothing has begun in its place (default 120).",
    )
    add(
        "preload",
        type=str,
        default=None,
        help="Modules that are imported once for all workers (default: the script's own top-level imports), or `none`: "
        "each worker is a new interpreter.",
    )
    add("run-dir", type=str, default=None, help="Folder of this run's events, logs and report.")
    add("checkpoint-dir", type=str, default=None, help="Where checkpoints are committed; none without it.")
    add("checkpoint-interval", type=int, default=None, help="Steps from one checkpoint to the next (default 100).")
    add("checkpoint-keep", type=int, default=2, help="The newest complete checkpoints that are kept (default 2).")
    add("checkpoint-keep-every", type=int, default=None, help="Beside them those of steps that are multiples of it.")
    add("checkpoint-keep-best", type=int, default=0, help="Beside them so many of the best by --checkpoint-metric.")
    add(
        "checkpoint-metric",
        type=str,
        default=None,
        help="A name that rank 0 gives to run.log, less is better; NAME:max where more is.",
    )
    add(
        "snapshot-memory",
        type=str,
        default=None,
        help="Most host memory for snapshots, as 8GB (default: what is free).",
    )
    add(
        "soft-timeout", type=float, default=None, help="Seconds without progress until a hang is interrupted (learned)."
    )
    add(
        "hard-timeout", type=float, default=None, help="Seconds without progress until the rank is killed and replaced."
    )
    add("first-timeout", type=float, default=None, help="The same for set-up and first step (learned, at most 600).")
    finishes: list[Finish] = []
    for dotted in extensions:
        module, _, function = dotted.partition(":")
        finish = getattr(importlib.import_module(module), function)(parser)
        finishes += [finish] if finish is not None else []
    return parser, finishes


def _explain(parser: argparse.ArgumentParser) -> None:
    """Say of torch's own flags what they mean here, where that is something else."""
    meanings = {
        "max_restarts": "Restarts of the whole job before it fails; left out, a fault that made progress since the "
        "last one is free, and three alike at the same step end the job."
    }
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to an action
        action.help = meanings.get(action.dest, action.help)


def parse(argv: Sequence[str], extensions: Sequence[str] = ()) -> dict[str, Any]:
    """Return the flags as plain values. Raises UsageError; `--help` prints and raises SystemExit as argparse does."""
    parser, finishes = _built(extensions)
    given = vars(parser.parse_args(list(argv)))
    if given.get("shutdown_timeout") is None:
        given["shutdown_timeout"] = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # noqa: TID251 - torch's own variable
    for finish in finishes:
        finish(given)
    fill(given, os.environ)  # noqa: TID251 - Slurm's own variables
    refuse(given)
    try:
        low, high = parse_min_max_nnodes(given["nnodes"])
    except (ValueError, RuntimeError):
        low = high = 0
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {given['nnodes']}: give a number of nodes, 1 or more, or MIN:MAX with MIN <= MAX.")
    try:
        given["nproc"] = determine_local_world_size(given["nproc_per_node"])
    except (ValueError, RuntimeError) as error:
        asked = f"--nproc-per-node {given['nproc_per_node']}: {str(error).rstrip('.')}"
        raise UsageError(f"{asked}. Give a number of ranks, 1 or more, or cpu, gpu or auto.") from None
    if given["standalone"] and given["spare_nodes"]:
        raise UsageError("--standalone is a job of one node, and --spare-nodes are others: leave one of them out.")
    given["nodes"] = 1 if given["standalone"] else high
    given["least_nodes"] = None if low == high or given["standalone"] else low
    if given["max_restarts"] is not None:
        given["max_restarts"] = _whole("--max-restarts", given["max_restarts"])
    return {name: value for name, value in given.items() if _plain(value)}


def _whole(flag: str, text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a whole number.") from None


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)
