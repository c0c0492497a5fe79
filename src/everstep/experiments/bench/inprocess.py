"""`everstep bench inprocess`: what a fault costs under each implementation, measured from outside, in turn.

Rule 1: the implementations take turns, run by run, so that what else the machine does meets all of them alike.
Rule 2: the figures come from what the ranks wrote down themselves; our ledger only tells where our own time went.
"""

import argparse
import contextlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from everstep.clock import SYSTEM
from everstep.errors import EverstepError, UsageError
from everstep.events import FaultNoticed
from everstep.experiments.bench import launch
from everstep.experiments.bench.launch import Impl, Plan
from everstep.experiments.core.figures import NVRX, PARTS, STOPPED, Case, ratio, row, verdict
from everstep.experiments.core.tapes import Run
from everstep.goodput import report
from everstep.telemetry import say

AGAINST = {"nvrx": NVRX}


@dataclass
class Gathered:
    """All runs of one implementation and one case."""

    runs: list[Run] = field(default_factory=list[Run])
    ledger: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    left: int = 0


def implementations(args: argparse.Namespace) -> list[Impl]:
    """Return what is to be measured, in the order that was given."""
    modules = [*(args.impl or ([] if args.against else [launch.NATIVE])), *(AGAINST[name] for name in args.against)]
    if args.against and not args.impl:
        modules.insert(0, launch.NATIVE)
    given = [by_module(getattr(args, flag), flag) for flag in ("python", "launcher", "meet")]
    unknown = {name for values in given for name in values} - {"", *modules}
    if unknown:
        raise UsageError(f"{', '.join(sorted(unknown))} is not among what is measured: {', '.join(modules)}.")
    return [launch.choose(m, *(values.get(m, values.get("")) for values in given)) for m in dict.fromkeys(modules)]


def by_module(given: Sequence[str], flag: str) -> dict[str, str]:
    """Read `[MODULE=]VALUE` flags; the empty name stands for all."""
    found: dict[str, str] = {}
    for text in given:
        module, equals, value = text.rpartition("=")
        if not value or (equals and not module):
            raise UsageError(f"--{flag} {text}: write VALUE for all, or MODULE=VALUE for one.")
        if module in found:
            raise UsageError(f"--{flag} is given twice for {module or 'all'}: {found[module]} and {value}.")
        found[module] = value
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Do all runs; return the result as plain values. Raises UsageError for what cannot be meant."""
    impls = implementations(args)
    cases = [Case(fault, ranks, args.backend, args.tuned) for ranks in args.ranks for fault in args.fault]
    plan = Plan(
        faults=args.faults, steps=args.steps, injured=args.injured, spares=args.spares, soft_s=args.soft,
        limit_s=args.limit,
    )  # fmt: skip
    gathered = {(impl, case): Gathered() for case in cases for impl in impls}
    begun = machine()
    with folder(args.out) as home:
        for number in range(args.runs):
            for at, (impl, case) in enumerate(gathered):
                _one(impl, case, plan, home / f"{number}-{at}-{impl.module}-{case.fault}-{case.ranks}", gathered)
    rows = [row(i.to_json(), c, g.runs, g.ledger, g.left) for (i, c), g in gathered.items()]
    return {
        "bench": "inprocess",
        "machine": begun | {"load_at_end": os.getloadavg()[0]},
        "versions": {i.module: versions(i) for i in impls},
        "plan": {name: getattr(plan, name) for name in plan.__slots__} | {"runs": args.runs},
        "rows": rows,
        "verdicts": judged(rows),
    }


def _one(impl: Impl, case: Case, plan: Plan, folder: Path, into: Mapping[tuple[Impl, Case], Gathered]) -> None:
    ran, left = launch.run(impl, case, plan, folder)
    gathered = into[impl, case]
    gathered.runs.append(ran)
    gathered.left += left
    if impl.launcher == "everstep":
        gathered.ledger += _ledger(folder / "run", ran)
    over = sorted(r.step_s for r in ran.recoveries if r.step_s is not None)
    took = f", {over[0]:.3f} to {over[-1]:.3f} s" if over else ""
    say(f"bench: {impl}, {case}: {len(over)} of {len(ran.recoveries)} faults over{took}; {ran.outcome}")


def _ledger(run_dir: Path, ran: Run) -> Sequence[Mapping[str, Any]]:
    """Return the faults as our ledger tells them, noticed after they hit; none where the run did not come so far.

    Where the function has no `run.steps`, the ledger sees no step: what it says of the time after the stop is void.
    """
    try:
        ledger, log = report.load(run_dir)
    except EverstepError as error:
        say(f"bench: {run_dir} has no ledger: {error}")
        return ()
    noticed: dict[int, float] = {}
    for record in log.records:
        if isinstance(record.event, FaultNoticed):
            noticed.setdefault(record.event.number, record.stamp.mono_s)
    hit = {fault.generation: fault.at_s for fault in ran.recoveries}
    known = (*PARTS,) if ledger.figures.steps else STOPPED
    return [
        {part: getattr(fault, part) for part in known}
        | {"detect_s": max(0.0, noticed[fault.generation] - hit[fault.generation])}
        for fault in ledger.recoveries
        if fault.generation in noticed.keys() & hit.keys()
    ]


@contextlib.contextmanager
def folder(given: Path | None) -> Generator[Path]:
    """Give a folder for tapes and outputs: a named one stays."""
    if given is not None:
        stamp = datetime.fromtimestamp(SYSTEM.wall(), UTC).strftime("%Y%m%d-%H%M%S")
        yield given / stamp
        return
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        yield Path(folder)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare our rows with theirs of the same case, and with their budgets."""
    key = ("fault", "ranks", "backend")
    found: list[dict[str, Any]] = []
    for mine in rows:
        if mine["impl"].split(".")[0] != launch.NATIVE:
            continue
        theirs = [r for r in rows if r["impl"] == NVRX and all(r[k] == mine[k] for k in key)]
        against = theirs[0] if theirs else None
        said = verdict(mine, against)
        found.append(
            {"impl": mine["impl"], "launcher": mine["launcher"], "fault": mine["fault"], "ranks": mine["ranks"]}
            | {"times_faster": ratio(mine, against) if against is not None else None}
            | {"budget_kept": said.kept if said else None, "budget": said.reason if said else "none is promised"}
        )
    return found


def machine() -> dict[str, Any]:
    """Say where and when this is measured."""
    return {
        "when": datetime.fromtimestamp(SYSTEM.wall(), UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
    }


def versions(impl: Impl) -> dict[str, str]:
    """Return the versions of interpreter, torch and implementation."""
    top = impl.module.split(".")[0]
    package = {"nvidia_resiliency_ext": "nvidia-resiliency-ext"}.get(top, top)
    done = subprocess.run([impl.python, "-c", _VERSIONS, "torch", package], capture_output=True, text=True, check=False)
    names = ("python", "torch", package)
    return dict(zip(names, done.stdout.split(), strict=False))


_VERSIONS = """
import importlib.metadata as metadata, platform, sys
found = [platform.python_version()]
for name in sys.argv[1:]:
    try:
        found.append(metadata.version(name))
    except metadata.PackageNotFoundError:
        found.append("?")
print(*found)
"""
