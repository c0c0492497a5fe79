"""`everstep`: the command line; `wiring` puts the features of `everstep run` together.

Light at the top: `report`, `faults plan` and `checkpoint ls` load no torch; `run` and `doctor` never do so here.
"""

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence
from typing import NoReturn

from everstep import __version__
from everstep.errors import EverstepError, ExitCode, UsageError
from everstep.telemetry import leave_streams, say

_COMMANDS = {
    "report": "everstep.goodput.commands",
    "checkpoint": "everstep.checkpoint.commands",
    "doctor": "everstep.doctor.commands",
    "top": "everstep.operator.top",
    "ps": "everstep.operator.ps",
    "drain": "everstep.operator.drain",
    "exclude": "everstep.operator.exclude",
    "kill": "everstep.operator.kill",
    "stacks": "everstep.operator.stacks",
    "faults": "everstep.faults.commands",
    "bench": "everstep.experiments.bench.commands",
}
"""Sub-commands and the module that brings each: `add_parser(subparsers)` and `run(arguments) -> exit code`."""


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
    finally:
        leave_streams()


def ft_launcher(argv: Sequence[str] | None = None) -> int:
    """Run a job as NVRx's `ft_launcher`: its flags and defaults; return the exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), as_ft_launcher=True)
    except EverstepError as error:
        say(str(error))
        return int(error.exit_code)
    finally:
        leave_streams()


def _run(words: Sequence[str], *, as_ft_launcher: bool = False) -> int:
    if platform.system() != "Linux":
        raise UsageError("everstep run needs Linux: it watches processes by pidfd and keeps snapshots in memfds.")
    from everstep.launcher import early  # noqa: PLC0415 - Linux only, and the other commands stay light without it

    try:
        with early.heard():
            from everstep import wiring  # noqa: PLC0415 - takes a while: signals are heard before
            from everstep.process import kernel  # noqa: PLC0415 - likewise

            kernel.hold_standard_streams()
            return wiring.run(words, as_ft_launcher=as_ft_launcher)
    except early.Asked as asked:
        say(f"ended by {asked.name} from outside, before any rank began")
        return ExitCode.SIGNALLED + asked.number


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
