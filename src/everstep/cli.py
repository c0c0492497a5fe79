"""`everstep`: the command line, which knows the features and wires them together.

Light at the top: `report`, `faults plan` and `checkpoint ls` load no torch; `run` never does in this process.
"""

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from everstep import __version__, environ
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.shelf import Shelf
from everstep.errors import EverstepError, ExitCode, UsageError
from everstep.faults import flags as faults
from everstep.faults.companion import FaultCompanion
from everstep.goodput.companion import ProgressCompanion
from everstep.goodput.progress import Progress
from everstep.launcher import run
from everstep.launcher.config import LaunchConfig, bytes_of
from everstep.launcher.run import Riders
from everstep.telemetry import say

_COMMANDS = {
    "report": "everstep.goodput.commands",
    "checkpoint": "everstep.checkpoint.commands",
    "faults": "everstep.faults.commands",
}
"""Sub-commands and the module that brings each: `add_parser(subparsers)` and `run(arguments) -> exit code`."""

RUN_EXTENSIONS = ("everstep.faults.flags:add_run_arguments",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] == "run":
            return _run(words[1:])
        return _other(words)
    except EverstepError as error:
        say(str(error))
        return int(error.exit_code)
    except BrokenPipeError:  # `everstep report | head`
        return int(ExitCode.FAILED)


def _run(words: Sequence[str]) -> int:
    if platform.system() != "Linux":
        raise UsageError("everstep run needs Linux: it watches processes by pidfd and keeps snapshots in memfds.")
    return run.main(words, RUN_EXTENSIONS, riders)


def riders(config: LaunchConfig, run_dir: Path) -> Riders:
    """Choose what rides on the agent: snapshots, checkpoints, faults, the display."""
    del run_dir
    display = Progress()
    riding = Riders(sinks=[display])
    if not config.wrapped:
        return riding
    given = config.flags
    cap = given.get("snapshot_memory")
    shelf = Shelf(cap_bytes=None if cap is None else bytes_of(str(cap)), readers=1)
    riding.companions.append(shelf)
    directory = given.get("checkpoint_dir") or environ.get("EVERSTEP_CHECKPOINT_DIR")
    if directory is not None:
        disk = Disk(str(directory), _interval(given.get("checkpoint_interval")), shelf, int(given["checkpoint_keep"]))
        shelf.older = disk.committed
        riding.companions.append(disk)
    request = faults.request_from(argparse.Namespace(**given))
    if request is not None:
        riding.environment |= request.environment()
    riding.companions += [FaultCompanion(request, display.say), ProgressCompanion(display)]
    return riding


def _interval(flag: object) -> int:
    text = environ.get("EVERSTEP_CHECKPOINT_INTERVAL", "100") if flag is None else str(flag)
    assert text is not None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--checkpoint-interval {text}: give a number of steps, 1 or more.")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nSee `{self.prog} --help`.")


def _other(words: Sequence[str]) -> int:
    parser = _Parser(prog="everstep", description="Keeps PyTorch training stepping through faults.")
    parser.add_argument("--version", action="version", version=f"everstep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    commands.add_parser("run", help="start a job: torchrun's flags, and ours", add_help=False)
    modules = {name: importlib.import_module(module) for name, module in _COMMANDS.items()}
    for module in modules.values():
        module.add_parser(commands)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return int(ExitCode.USAGE)
    return int(modules[arguments.command].run(arguments))


if __name__ == "__main__":
    sys.exit(main())
