"""`everstep bench inprocess | injob | weaknesses | checkpoint | controlplane | show`.

Exit code 0 where the measuring was done, whatever it showed; with --check 1 where a budget is not kept; 64 for what
cannot be meant.
"""

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep.errors import ExitCode, UsageError
from everstep.experiments.bench import checkpoint_flags
from everstep.experiments.core.figures import SIZES
from everstep.experiments.core.injob import WAYS

FAULTS = ("exception", "hang", "hang_c", "gil", "sigkill", "sigstop")


def add_parser(commands: Any) -> None:
    """Add `bench` to the subparsers of `everstep`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure recovery, checkpoints and the control plane, with NVRx beside",
        description="Measurements that anybody can repeat. See docs/bench.md.",
    )
    verbs = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    _inprocess(verbs.add_parser("inprocess", help="what a fault costs under each implementation, from outside"))
    _injob(verbs.add_parser("injob", help="what a restart, a start, an end and a rest cost under each launcher"))
    _weaknesses(verbs.add_parser("weaknesses", help="each weakness of NVRx as a script, run under it and under ours"))
    _controlplane(verbs.add_parser("controlplane", help="from a fault to the next roster, with simulated ranks"))
    saving = verbs.add_parser(
        "checkpoint", help="what a loop pays for checkpoints, by interval, on a store of a bandwidth"
    )
    checkpoint_flags.add_arguments(saving)
    _told(saving)
    show = verbs.add_parser("show", help="print a result that --json has written")
    show.add_argument("result", type=Path, metavar="FILE")
    show.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs the extra `plots`)")
    show.add_argument("--json", action="store_true", help="print it as it is")


def _inprocess(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--impl", action="append", metavar="MODULE",
        help="what is measured: it has NVRx's in-process interface; `everstep`: the native surface")  # fmt: skip
    add("--against", action="append", default=[], choices=["nvrx"], help="measure NVRx beside it, from .venv-peers")
    add("--python", action="append", default=[], metavar="[MODULE=]PATH", help="interpreter that has the module")
    add("--launcher", action="append", default=[], metavar="[MODULE=]NAME",
        help="bare, everstep or torchrun (default: everstep for ours, bare for others)")  # fmt: skip
    add("--fault", type=_faults, default=["exception"], metavar="NAMES", help=f"from {', '.join(FAULTS)}")
    add("--ranks", type=_numbers, default=[2], metavar="NUMBERS", help="sizes of the world, as 2,4,8")
    add("--faults", type=_at_least(1), default=5, help="faults of one run (default 5)")
    add("--runs", type=_at_least(1), default=1, help="runs of each case (default 1)")
    add("--steps", type=_at_least(2), default=20, help="steps from one fault to the next (default 20)")
    add("--injured", type=_at_least(0), default=1, metavar="RANK", help="who is at fault (default 1)")
    add("--spares", type=_at_least(0), default=1, help="of everstep run (default 1)")
    add("--backend", default="gloo", choices=["gloo", "nccl"])
    add("--tuned", action="store_true", help="NVRx's intervals at 10 ms instead of its defaults")
    add("--soft", type=float, metavar="SECONDS", help="soft limit of hangs, hard 10 s later; left out: the defaults")
    add("--limit", type=float, default=120.0, metavar="SECONDS", help="end a run when nothing happens for so long")
    add("--meet", action="append", default=[], metavar="[MODULE=]HOW",
        help="groups on a store of the script's `own` (default) or by `plain` init_process_group")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="keep tapes and outputs there")
    _told(parser)


def _injob(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", type=_chooser(("restart", "launch", "idle")), default=["restart", "launch", "idle"], metavar="PARTS",
        help="from restart, launch, idle (default: all)")  # fmt: skip
    add("--ways", type=_chooser(WAYS), default=None, metavar="NAMES", help=f"from {', '.join(WAYS)} (default: all)")
    kinds = ("sigkill", "exception", "hang")
    add("--fault", type=_chooser(kinds), default=[*kinds], metavar="NAMES", help=f"from {', '.join(kinds)}")
    add("--ranks", type=_numbers, default=[2, 4], metavar="NUMBERS", help="sizes of the world (default 2,4)")
    add("--faults", type=_at_least(1), default=3, help="faults of one run (default 3)")
    add("--runs", type=_at_least(1), default=1, help="runs of each case (default 1)")
    add("--steps", type=_at_least(2), default=20, help="steps from one fault to the next (default 20)")
    add("--workers", type=_at_least(1), default=8, help="of the job whose start is measured (default 8)")
    add("--idle", type=float, default=20.0, metavar="SECONDS", help="for which a job at rest is watched (default 20)")
    add("--heartbeat", type=float, default=6.0, metavar="SECONDS", help="ft_launcher's limit of silence (default 6)")
    add("--limit", type=float, default=120.0, metavar="SECONDS", help="end a run when nothing happens for so long")
    add("--out", type=Path, metavar="DIR", help="keep tapes and outputs there")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--check", action="store_true", help="exit code 1 where a budget is not kept")
    parser.set_defaults(plot=None)


def _weaknesses(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", type=lambda text: text.split(","), default=[], metavar="IDS", help="as W2,W5 (default: all)")
    add("--beside", type=_at_least(1), default=3, metavar="NUMBER",
        help="run so many at a time of those that mostly wait (default 3)")  # fmt: skip
    add("--python", action="append", default=[], metavar="PATH", help="interpreter that has NVRx")
    add("--page", type=Path, metavar="FILE", help="write the result there as a page of the documentation")
    add("--out", type=Path, metavar="DIR", help="keep tapes and outputs there")
    add("--json", action="store_true", help="print JSON instead of the page")
    add("--check", action="store_true", help="exit code 1 where ours does not do better")
    parser.set_defaults(plot=None)


def _controlplane(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=_numbers, default=[4096], metavar="NUMBERS",
        help=f"simulated ranks; one number N means {', '.join(map(str, SIZES[:-1]))} up to N (4096)")  # fmt: skip
    add("--rounds", type=_at_least(1), default=5, help="faults at each size (default 5)")
    add("--per-node", type=_at_least(1), default=8, metavar="RANKS", help="ranks of a node (default 8)")
    add("--arrivals", default="node", choices=["rank", "node"], help="a key for each rank, or one a node (default)")
    add("--processes", type=_at_least(1), default=4, help="processes that hold the clients (default 4)")
    add("--without-barrier", action="store_true", help="leave NVRx's barrier out")
    add("--python", metavar="PATH", help="interpreter that has NVRx: its own barrier runs")
    add("--limit", type=float, default=180.0, metavar="SECONDS", help="give up on a size after so long")
    _told(parser)


def _told(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs the extra `plots`)")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a budget is not kept")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; raises EverstepError for what cannot be meant."""
    # Here and not at the top: `everstep report` needs neither psutil's scan nor rich's tables of this.
    from everstep.experiments.bench import (  # noqa: PLC0415
        checkpoint,
        controlplane,
        injob,
        inprocess,
        plot,
        show,
        weaknesses,
    )

    if args.plot is not None:
        plot.check()
    measures: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "inprocess": inprocess.measure, "injob": injob.measure, "weaknesses": weaknesses.measure,
        "controlplane": controlplane.measure, "checkpoint": checkpoint.measure, "show": _saved,
    }  # fmt: skip
    with _leaving():
        result = measures[args.bench_command](args)
    if args.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        show.print_result(result)
    if args.plot is not None:
        plot.draw(result, args.plot)
    missed = [v for v in result["verdicts"] if v["budget_kept"] is False]
    return int(ExitCode.FAILED if getattr(args, "check", False) and missed else ExitCode.DONE)


@contextlib.contextmanager
def _leaving() -> Generator[None]:
    """Have SIGTERM and SIGHUP unwind as Ctrl-C does, so that what was started is ended."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    del frame
    raise SystemExit(int(ExitCode.SIGNALLED) + number)


def _saved(args: argparse.Namespace) -> dict[str, Any]:
    from everstep.experiments.bench import show  # noqa: PLC0415 - as in `run`

    try:
        found = json.loads(args.result.read_text())
        known = found["bench"] in show.PRINTERS
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{args.result} is no result of `everstep bench … --json` ({error}).") from error
    if not known:
        raise UsageError(f"{args.result} tells of a benchmark {found['bench']!r} that is unknown here.")
    return found  # type: ignore[no-any-return]


def _faults(text: str) -> list[str]:
    return _each(text, FAULTS)


def _each(text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong) or text!r} is none of {', '.join(known)}")
    return names


def _chooser(known: Sequence[str]) -> Callable[[str], list[str]]:
    return lambda text: _each(text, known)


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers from 1, as 2,4,8")
    return [int(word) for word in words]


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least}")
        return int(text)

    return number
