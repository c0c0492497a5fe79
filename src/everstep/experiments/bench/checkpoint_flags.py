"""The flags of `everstep bench checkpoint`, which every `everstep` command builds: nothing heavy is imported here."""

import argparse
from pathlib import Path
from typing import Any

from everstep.experiments.core import checkpoints
from everstep.experiments.core.checkpoints import MODES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark, but those that all have."""
    add = parser.add_argument
    add("--bandwidth", type=_meant(checkpoints.rate), default=10_000_000, metavar="RATE",
        help="of the store, as 10MB/s (default); `unlimited`: the store as it is")  # fmt: skip
    add("--intervals", type=_steps, default=[1, 10, 100], metavar="STEPS", help="default 1,10,100")
    add("--modes", type=_modes, default=list(MODES), metavar="NAMES", help=f"from {', '.join(MODES)} (default: all)")
    add("--ranks", type=_count, default=1, help="so many processes share the state, over gloo (default 1)")
    add("--state", type=_meant(checkpoints.size), default=64_000_000, metavar="SIZE",
        help="of all ranks together, as 64MB (default)")  # fmt: skip
    add("--step", type=_seconds, default=0.05, metavar="SECONDS", help="what a step takes (default 0.05)")
    add("--work", choices=["sleep", "matmul"], default="sleep",
        help="what a step does: wait, as for a device, or multiply matrices")  # fmt: skip
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is (default cpu)")
    add("--rounds", type=_count, default=1, help="measure everything so many times, in turn (default 1)")
    add("--seconds", type=_seconds, metavar="SECONDS",
        help="measure for at least so long each time (default: four writes)")  # fmt: skip
    add("--store", type=Path, metavar="DIR", help="where the store lies (default: memory, where there is room)")
    add("--python", metavar="PATH", help="interpreter that has NVRx (default: that of .venv-peers)")
    add("--limit", type=_seconds, default=120.0, metavar="SECONDS",
        help="give a way up that takes so much longer than it may (default 120)")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="keep tapes and outputs there")


def _meant(read: Any) -> Any:
    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def _steps(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r}: write different whole numbers from 1, as 1,10,100")
    return [int(word) for word in words]


def _modes(text: str) -> list[str]:
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    wrong = [name for name in names if name not in MODES]
    if wrong or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong) or text!r} is none of {', '.join(MODES)}")
    return names


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, more than none")
    return value


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1")
    return int(text)
