"""`everstep bench checkpoint`: what a loop pays for its checkpoints under each way to save, on a store of a bandwidth.

Rule 1: every way has the same loop, the same state and the same throttled store, one after another in turn; each
        measured stretch is a process of its own, with the same loop without checkpoints before and after.
Rule 2: a way that does not run here is a row that says so in a word, never left out.
Rule 3: of several ranks a row is the slowest one's, with what all of them held durable.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import UsageError
from everstep.experiments.bench import checkpoint_disk, inprocess, launch
from everstep.experiments.bench.checkpoint_disk import Disk
from everstep.experiments.bench.launch import Impl, Limits
from everstep.experiments.core import checkpoints
from everstep.experiments.core.checkpoints import LABELS, NVRX_MODE, Window
from everstep.experiments.core.figures import NVRX
from everstep.experiments.core.tapes import Ending
from everstep.telemetry import say

SCRIPT = Path(__file__).parent / "alone" / "checkpoint_loop.py"
BASE = "everstep.checkpoint"
READ = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is the same for all: the loop, its state, and how long it is looked at."""

    ranks: int
    state: int  # bytes, of all ranks together
    bandwidth: int | None
    step_s: float
    work: str
    device: str
    with_s: float
    bare_s: float
    limit_s: float


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways at all intervals; return the result as plain values.

    Raises UsageError for what cannot be meant, ConfigurationError where the store cannot be throttled here.
    """
    checkpoint_disk.check(args.bandwidth)
    with_s, bare_s = checkpoints.stretch(args.state, args.bandwidth, args.step, args.seconds)
    load = Load(
        ranks=args.ranks, state=args.state, bandwidth=args.bandwidth, step_s=args.step, work=args.work,
        device=args.device, with_s=with_s, bare_s=bare_s, limit_s=args.limit,
    )  # fmt: skip
    impls, missing = _implementations(args.modes, args.python)
    cases = [(mode, interval) for interval in args.intervals for mode in args.modes]
    say(f"bench: about {_about(args, len(impls)):.0f} s for {len(cases)} rows")
    seen: dict[tuple[str, int], list[Window]] = {case: [] for case in cases}
    words = {case: missing[case[0]] for case in cases if case[0] in missing}
    left = dict.fromkeys(cases, 0)
    begun = inprocess.machine()
    with inprocess.folder(args.out) as home, checkpoint_disk.disk(args.bandwidth, args.store, args.state) as disk:
        for number in range(args.rounds):
            for mode, interval in cases:
                if (mode, interval) in words:  # it did not run, and will not
                    continue
                found, word, more = _one(impls[mode], mode, interval, load, disk, home / f"{number}-{mode}-{interval}")
                left[mode, interval] += more
                if found is None:
                    words[mode, interval] = word
                else:
                    seen[mode, interval].append(found)
        told = {"path": disk.how, "asked": args.bandwidth, "measured": disk.rate}
    least = args.state / args.bandwidth if args.bandwidth else 0.0
    rows = [checkpoints.row(*case, seen[case], words.get(case, "done"), left[case], least) for case in cases]
    return {
        "bench": "checkpoint",
        "machine": begun | {"load_at_end": os.getloadavg()[0]},
        "versions": {LABELS[mode]: inprocess.versions(impl) for mode, impl in impls.items() if mode in _VERSIONED},
        "plan": {name: getattr(load, name) for name in load.__slots__} | {"rounds": args.rounds},
        "disk": told,
        "rows": rows,
        "verdicts": judged(rows, args.device),
    }


_VERSIONED = ("everstep", "torch.save", NVRX_MODE)


def judged(rows: Sequence[Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """Hold our rows against their budget."""
    said = [(row, checkpoints.verdict(row, device)) for row in rows]
    return [
        {"mode": row["mode"], "interval": row["interval"], "budget_kept": one[0], "budget": one[1]}
        for row, one in said
        if one is not None
    ]


def _implementations(modes: Sequence[str], python: str | None) -> tuple[dict[str, Impl], dict[str, str]]:
    """Return who runs each mode, and a word for those that nobody here can run."""
    impls = {mode: Impl(BASE, sys.executable, "bare") for mode in modes if mode != NVRX_MODE}
    if NVRX_MODE not in modes:
        return impls, {}
    try:
        return impls | {NVRX_MODE: launch.choose(NVRX, python, "bare")}, {}
    except UsageError:
        if python is not None:
            raise
        return impls, {NVRX_MODE: "not installed (`make peers`, or --python)"}


def _about(args: argparse.Namespace, modes: int) -> float:
    return checkpoints.estimate(
        modes, args.intervals, args.rounds, args.step, args.state, args.bandwidth, args.seconds, args.ranks
    )


def _one(impl: Impl, mode: str, interval: int, load: Load, disk: Disk, folder: Path) -> tuple[Window | None, str, int]:
    """Measure one window; return it, or a word, and how many processes had to be ended after it."""
    target = disk.path / f"{mode}-{interval}"
    target.mkdir()
    words = [
        str(SCRIPT), "--mode", mode, "--folder", str(target), "--tape", str(folder), "--interval", str(interval),
        "--state", str(load.state), "--step", str(load.step_s), "--work", load.work, "--device", load.device,
        "--with-s", str(load.with_s), "--bare-s", str(load.bare_s),
    ]  # fmt: skip
    most = load.limit_s + 4 * checkpoints.estimate(
        1, [interval], 1, load.step_s, load.state, load.bandwidth, load.with_s, load.ranks
    )
    limits = Limits(start_s=most, silent_s=most, most_s=most)
    try:
        ending, left = launch.drive(launch.launched(impl, words, load.ranks, folder), folder, limits)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    found, word = _read(mode, folder, ending)
    row = checkpoints.row(mode, interval, [found] if found else [], word)
    percent = f"{row['efficiency']:.2%}" if found else word
    say(f"bench: {LABELS[mode]}, every {interval}: {percent}")
    return found, word, left


def _read(mode: str, folder: Path, ending: Ending) -> tuple[Window | None, str]:
    """Read the ranks' tapes; a rank that failed first says why there is no figure."""
    paths = [folder / f"window-{rank}.json" for rank in range(len(ending.codes))]
    bodies: list[dict[str, Any]] = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    if ending.silent_s is not None:
        return None, f"no end within {ending.silent_s:.0f} s"
    if all("bare" in body for body in bodies) and not any(ending.codes):
        return checkpoints.slowest([Window.from_json(body) for body in bodies]), "done"
    failed = min((body for body in bodies if "failed" in body), key=lambda body: body["at"], default=None)
    if failed is not None:
        return None, checkpoints.word(mode, failed["failed"])
    rank, code = next(((rank, code) for rank, code in enumerate(ending.codes) if code != 0), (0, 0))
    out = (folder / f"out-{rank}.txt").read_bytes()[-READ:].decode(errors="replace").strip()
    return None, checkpoints.word(mode, out.rpartition("\n")[2] or f"exit code {code}")
