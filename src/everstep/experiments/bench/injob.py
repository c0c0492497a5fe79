"""`everstep bench injob`: what a restart, a start, an end and a rest cost under each launcher, in turn.

Rule 1: launchers take turns, run by run, so that what else the machine does meets all of them alike.
Rule 2: figures come from what the ranks wrote down; our ledger only says when a fault was noticed.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from everstep.clock import SYSTEM
from everstep.errors import EverstepError, UsageError
from everstep.events import FaultNoticed
from everstep.experiments.bench import inprocess, launch
from everstep.experiments.bench.launch import Impl, Limits, Plan
from everstep.experiments.core import injob as core
from everstep.experiments.core.figures import Case
from everstep.experiments.core.tapes import Run, judge, read
from everstep.goodput import report
from everstep.telemetry import say

TRAINEE = Path(__file__).parent / "alone" / "trainee.py"
PARTS = ("restart", "launch", "idle")
THEIRS = "nvidia_resiliency_ext.fault_tolerance"
SETTLE_S = 3.0


@dataclass
class Gathered:
    """All runs of one launcher and one case."""

    runs: list[Run] = field(default_factory=list[Run])
    noticed: list[float] = field(default_factory=list[float])
    left: int = 0


@dataclass(frozen=True, slots=True)
class Ways:
    """How each launcher is started."""

    peers: str
    heartbeat_s: float
    restarts: int

    def command(self, way: str, ranks: int, folder: Path, *words: str, fault: str = "") -> list[str]:
        """Return the command that starts the script on each rank."""
        script = [str(TRAINEE), "--tape", str(folder), *words]
        count = ["--nproc-per-node", str(ranks)]
        restarts = ["--max-restarts", str(self.restarts)]
        (port,) = launch.free_ports(1)
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        if way == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", *count, *restarts, *meet, *script]
        if way == "ft_launcher":
            beats = ["--ft-rank-heartbeat-timeout", str(self.heartbeat_s)]
            first = ["--ft-initial-rank-heartbeat-timeout", str(4 * self.heartbeat_s)]
            own = [self.peers, "--nnodes", "1", *count, *restarts, *meet, "--ft-restart-policy", "any-failed"]
            return [*own, *beats, *first, *script, "--speak-to", THEIRS] if fault else [*own, *beats, *first, *script]
        own = [sys.executable, "-m", "everstep", "run", *count, *restarts, "--run-dir", str(folder / "run")]
        return [*own, *(["--preload", "none"] if way == "cold" else []), *script]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Do all runs; return the result as plain values. Raises UsageError for what cannot be meant."""
    chosen = args.ways or list(core.WAYS)
    peers = _peers() if "ft_launcher" in chosen else ""
    ways = Ways(peers, args.heartbeat, args.faults + 1)
    begun = inprocess.machine()
    with inprocess.folder(args.out) as home:
        result = {
            "restarts": _restarts(args, chosen, ways, home) if "restart" in args.only else [],
            "launches": _launches(args, chosen, ways, home) if "launch" in args.only else [],
            "idle": _idle(args, chosen, ways, home) if "idle" in args.only else [],
        }
    return {
        "bench": "injob",
        "machine": begun | {"load_at_end": os.getloadavg()[0]},
        "versions": {"everstep": inprocess.versions(Impl("everstep", sys.executable, "everstep"))}
        | ({THEIRS: inprocess.versions(Impl(THEIRS, str(Path(peers).with_name("python")), "bare"))} if peers else {}),
        **result,
        "rows": result["restarts"],
        "verdicts": core.verdicts(result),
    }


def _peers() -> str:
    """Return NVRx's launcher: of `.venv-peers`, where there is one, else the one on the path."""
    for folder in (Path.cwd(), *Path(__file__).parents):
        found = folder / ".venv-peers" / "bin" / "ft_launcher"
        if found.exists():
            return str(found)
    found_here = shutil.which("ft_launcher")
    if found_here is None:
        raise UsageError(
            "ft_launcher is not here: `make peers` in a clone of the repository makes an environment that has it; or "
            f"leave it out with --ways {','.join(way for way in core.WAYS if way != 'ft_launcher')}."
        )
    return found_here


# -- restarts --------------------------------------------------------------------------------------------------------


def _restarts(args: argparse.Namespace, chosen: Sequence[str], ways: Ways, home: Path) -> list[dict[str, Any]]:
    cases = [(fault, ranks, way) for ranks in args.ranks for fault in args.fault for way in chosen]
    gathered = {case: Gathered() for case in cases if _hears(case[2], case[0])}
    for number in range(args.runs):
        for (fault, ranks, way), into in gathered.items():
            folder = home / f"{number}-{way}-{fault}-{ranks}"
            run, left = _restart(args, ways, way, fault, ranks, folder)
            into.runs.append(run)
            into.left += left
            if way in core.OURS:
                into.noticed += _noticed(folder / "run", run)
            over = [r.step_s for r in run.recoveries if r.step_s is not None]
            took = f", {min(over):.3f} to {max(over):.3f} s" if over else ""
            say(f"bench: {way}, {fault}, {ranks} ranks: {len(over)} of {len(run.recoveries)}{took}; {run.outcome}")
    return [core.restart_row(w, f, r, g.runs, g.noticed, g.left) for (f, r, w), g in gathered.items()]


def _hears(way: str, fault: str) -> bool:
    """Tell whether a hang is noticed at all: by a monitor that the script speaks to, or in a wrapped function."""
    return fault != "hang" or way in (*core.MONITORED, "spare")


def _restart(args: argparse.Namespace, ways: Ways, way: str, fault: str, ranks: int, folder: Path) -> tuple[Run, int]:
    if way == "spare":
        impl = launch.choose(launch.NATIVE)
        plan = Plan(faults=args.faults, steps=args.steps, limit_s=args.limit)
        return launch.run(impl, Case(fault, ranks), plan, folder)
    words = ["--fault", fault, "--faults", str(args.faults), "--steps", str(args.steps)]
    command = ways.command(way, ranks, folder, *words, fault=fault)
    ending, left = launch.drive([(command, {})], folder, Limits(silent_s=args.limit))
    return judge(read(launch.tapes(folder)), ending), left


def _noticed(run_dir: Path, run: Run) -> list[float]:
    """Return after how long each fault was noticed, as our ledger has it."""
    try:
        _, log = report.load(run_dir)
    except EverstepError as error:
        say(f"bench: {run_dir} has no ledger: {error}")
        return []
    first: dict[int, float] = {}
    for record in log.records:
        if isinstance(record.event, FaultNoticed):
            first.setdefault(record.event.number, record.stamp.mono_s)
    return [max(0.0, first[r.generation] - r.at_s) for r in run.recoveries if r.generation in first]


# -- starts and ends -------------------------------------------------------------------------------------------------


def _launches(args: argparse.Namespace, chosen: Sequence[str], ways: Ways, home: Path) -> list[dict[str, Any]]:
    sizes = sorted({*args.ranks, args.workers})
    lives: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(args.runs):
        for ranks in sizes:
            for way in (w for w in chosen if w != "spare"):
                life = _life(ways, way, ranks, home / f"{number}-launch-{way}-{ranks}")
                if life is not None:
                    lives.setdefault((way, ranks), []).append(life)
    return [core.launch_row(way, ranks, found) for (way, ranks), found in lives.items()]


def _life(ways: Ways, way: str, ranks: int, folder: Path) -> dict[str, float] | None:
    """Run a job without a fault; None where it did not come to its end."""
    folder.mkdir(parents=True)
    begun, ended = launch.live(ways.command(way, ranks, folder, "--faults", "0"), folder)
    marks = read(launch.tapes(folder))
    last = {what: max((m.at_s for m in marks if m.what == what), default=None) for what in ("enter", "step", "done")}
    entered, stepped, done = last["enter"], last["step"], last["done"]
    if ended is None or entered is None or stepped is None or done is None:
        say(f"bench: {way}, {ranks} ranks: no end")
        return None
    say(f"bench: {way}, {ranks} ranks: {stepped - begun:.2f} s to the first step, ended {ended - done:.3f} s after all")
    return {"began_s": entered - begun, "step_s": stepped - begun, "end_s": ended - done}


# -- at rest ---------------------------------------------------------------------------------------------------------


def _idle(args: argparse.Namespace, chosen: Sequence[str], ways: Ways, home: Path) -> list[dict[str, Any]]:
    """Let two ranks sleep, and look at what is not a rank."""
    found: list[dict[str, Any]] = []
    for way in (w for w in chosen if w not in ("spare", "cold")):
        folder = home / f"idle-{way}"
        folder.mkdir(parents=True)
        asleep = str(args.idle + 60)
        with launch.alive(ways.command(way, 2, folder, "--idle", asleep), folder) as process:
            if _until_asleep(folder, args.limit):
                SYSTEM.sleep(SETTLE_S)
                found.append({"way": way, "ranks": 2} | _watch(psutil.Process(process.pid), folder, args.idle))
    return found


def _until_asleep(folder: Path, limit_s: float) -> bool:
    deadline = SYSTEM.now() + limit_s
    while SYSTEM.now() < deadline:
        if len({m.pid for m in read(launch.tapes(folder)) if m.what == "step"}) == 2:  # noqa: PLR2004 - two ranks
            return True
        SYSTEM.sleep(launch.LOOK_S)
    return False


def _watch(launcher: psutil.Process, folder: Path, window_s: float) -> dict[str, Any]:
    """Return CPU in cores and memory of all that the launcher is made of, its ranks apart."""
    ranks = {m.pid for m in read(launch.tapes(folder))}
    beside = [p for p in (launcher, *launcher.children(recursive=True)) if p.pid not in ranks]
    before = _cpu(beside)
    begun = SYSTEM.now()
    SYSTEM.sleep(window_s)
    used, took = _cpu(beside), SYSTEM.now() - begun
    shares = {pid: (used[pid] - before[pid]) / took for pid in used.keys() & before.keys()}
    parts: list[dict[str, Any]] = []
    for process in beside:
        with suppress(psutil.Error):
            memory = process.memory_full_info()
            parts.append(
                {"name": process.name(), "cpu_share": shares.get(process.pid, 0.0)}
                | {f"{kind}_mib": round(getattr(memory, kind) / 2**20, 1) for kind in ("pss", "rss")}
            )
    return {
        "cpu_share": sum(shares.values()), "window_s": took, "processes": parts,
        "pss_mib": round(sum(part["pss_mib"] for part in parts), 1),
    }  # fmt: skip


def _cpu(processes: Sequence[psutil.Process]) -> Mapping[int, float]:
    found: dict[int, float] = {}
    for process in processes:
        with suppress(psutil.Error):
            found[process.pid] = sum(process.cpu_times()[:2])
    return found
