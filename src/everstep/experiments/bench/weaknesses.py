"""`everstep bench weaknesses`: NVRx's weaknesses as small scripts, run under it and under ours, one run of each.

Rule 1: both run the same script in the same run of this command; only the import differs.
Rule 2: trials that are a matter of milliseconds run alone. Of the others, which mostly wait for limits of minutes,
        `--beside` run at a time.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from everstep.errors import UsageError
from everstep.experiments.bench import inprocess, launch
from everstep.experiments.bench.launch import Impl, Limits
from everstep.experiments.core import weaknesses
from everstep.experiments.core.figures import NVRX
from everstep.experiments.core.tapes import read
from everstep.experiments.core.weaknesses import NOT_RUN, TRIALS, Outcome, Trial, better, outcome, told
from everstep.telemetry import say

SCRIPT = Path(__file__).parent / "alone" / "weakness.py"
OURS = "everstep.inprocess"
Job: TypeAlias = tuple[Trial, Impl]
READ = 4_000_000  # bytes of a run's texts, from the end of each


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the trials; return the result as plain values, and write the page where one is named.

    Raises UsageError for a trial that there is not, or where NVRx is not installed.
    """
    trials = chosen(args.only)
    given = inprocess.by_module(args.python, "python")
    theirs = launch.choose(NVRX, given.get(NVRX, given.get("")), "bare")
    begun = inprocess.machine()
    with inprocess.folder(args.out) as home:
        jobs = [(trial, impl) for trial in trials for impl in (theirs, *ours(trial))]
        seen = _all(jobs, home, args.beside)
    rows = [
        line(trial, impl, seen[trial, impl], seen[trial, theirs])
        for trial, impl in jobs
        if impl != theirs
    ]  # fmt: skip
    result = {
        "bench": "weaknesses",
        "command": " ".join(["everstep bench weaknesses", *(["--only", ",".join(args.only)] if args.only else [])]),
        "machine": begun | {"load_at_end": os.getloadavg()[0]},
        "versions": {"NVRx": inprocess.versions(theirs), "Everstep": inprocess.versions(launch.choose(OURS))},
        "rows": rows,
        "not_run": NOT_RUN,
        "verdicts": [{"id": row["id"], "budget_kept": bool(row["better"])} for row in rows],
    }
    if args.page is not None:
        args.page.write_text(weaknesses.page(result))
    return result


def chosen(only: Sequence[str]) -> list[Trial]:
    """Return the trials that were asked for, by id or by case; all where nothing was."""
    unknown = set(only) - {name for trial in TRIALS for name in (trial.id, trial.case)}
    if unknown:
        raise UsageError(f"--only {', '.join(sorted(unknown))}: give ids of {', '.join(t.case for t in TRIALS)}.")
    return [trial for trial in TRIALS if not only or trial.id in only or trial.case in only]


def ours(trial: Trial) -> list[Impl]:
    """Return the ways in which ours is tried."""
    return [launch.choose(launch.NATIVE if trial.native else OURS, None, name) for name in trial.launchers]


def line(trial: Trial, impl: Impl, mine: Outcome, theirs: Outcome) -> dict[str, Any]:
    """Return one row as plain values."""
    how = "@everstep.resilient" if trial.native else "everstep run" if impl.launcher == "everstep" else "bare"
    return {
        "id": trial.id, "case": trial.case, "does": trial.does, "ranks": trial.ranks, "launcher": impl.launcher,
        "ours": mine.to_json(), "theirs": theirs.to_json(), "theirs_told": told(trial, theirs),
        "ours_told": f"{how}: {told(trial, mine)}", "better": better(trial, mine, theirs),
    }  # fmt: skip


def _all(jobs: Sequence[Job], home: Path, beside: int) -> Mapping[Job, Outcome]:
    """Run those alone that must be alone, then all others, some at a time, in the order of the list."""
    alone = [job for job in jobs if job[0].alone]
    rest = [job for job in jobs if not job[0].alone]
    with ThreadPoolExecutor(beside) as pool:
        seen = [one(home, job) for job in alone] + list(pool.map(partial(one, home), rest))
    return dict(zip(alone + rest, seen, strict=True))


def one(home: Path, job: Job) -> Outcome:
    """Do one run in a folder of `home`; return what was seen."""
    trial, impl = job
    folder = home / f"{trial.case}-{impl.module}-{impl.launcher}".replace(" ", "-")
    ports = launch.free_ports(2)
    words = [
        str(SCRIPT), "--impl", impl.module, "--case", trial.case, "--tape", str(folder), "--meet", trial.meet,
        "--ports", ",".join(map(str, ports)),
    ]  # fmt: skip
    limits = Limits(silent_s=trial.silent_s, most_s=trial.most_s)
    ending, left = launch.drive(launch.launched(impl, words, trial.ranks, folder), folder, limits)
    found = outcome(trial, read(launch.tapes(folder)), ending, _texts(folder), left)
    say(f"bench: {trial.case}, {impl}: {told(trial, found)}")
    return found


def _texts(folder: Path) -> list[str]:
    """Return what a run has printed, then what else it wrote for people to read: the ledger."""
    paths = [*sorted(folder.glob("out-*.txt")), *sorted(folder.glob("run/**/*.jsonl"))]
    return [path.read_bytes()[-READ:].decode(errors="replace") for path in paths]
