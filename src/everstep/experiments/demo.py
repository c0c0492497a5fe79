"""`make demo`: a real model trains through five faults, and a proof that nothing was lost.

    python -m everstep.experiments.demo [--steps 200] [--nproc 2] [--seed 42] [--out .demo]

Three runs of one job, one after another: the plain loop under torchrun, the fault-free twin and the run with faults
under `everstep run`. Then the record of the training step is judged (`experiments.proof`), and a report is written.

Rule 1: the runs differ in nothing but the faults: same flags, same threads, same data, same seeds.
Rule 2: no run is waited for without end; one that is too slow is ended, and its record is judged all the same.
Rule 3: the exit code is 0 only where every finding holds.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from everstep import environ
from everstep.clock import SYSTEM, Clock
from everstep.errors import EverstepError, ExitCode, UsageError
from everstep.events import FaultInjected, ProcessStarted, Record
from everstep.experiments.plain import plain
from everstep.experiments.proof import Evidence, Finding, Struck, Tape, prove, read_tape, same_training, step_s
from everstep.faults.flags import read_stored
from everstep.goodput.core.accounting import Ledger
from everstep.goodput.log import read_run
from everstep.goodput.report import load, write_page

BUDGET_S = 180.0
_ENDING_S = 20.0  # for a run that was told to end
_SHOWN = 0.0005  # a smaller share of the time would print as 0.0 %
_QUIET = {
    "OMP_NUM_THREADS": "1",  # sums depend on the number of threads; torchrun sets this too
    "PYTHONWARNINGS": "ignore:'set_vital' is deprecated",  # torchdata's, at every start
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "error",
}


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: where its record lies, how it ended, how long it took."""

    name: str
    folder: Path
    code: int
    seconds: float

    def tape(self) -> Tape:
        """Return what its training steps wrote down; an empty tape where they never came to it."""
        record = self.folder.with_suffix(".jsonl")
        return read_tape(record.read_text().splitlines(), record.name) if record.exists() else Tape((), ())


def main(argv: Sequence[str] | None = None, clock: Clock = SYSTEM, console: Console | None = None) -> int:
    """Run the demo; return the exit code."""
    args = parser().parse_args(argv)
    out = console or Console()
    try:
        return _demo(args, clock, out)
    except EverstepError as error:
        out.print(f"[red]demo:[/] {error}", highlight=False)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.SIGNALLED) + 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the demo's own flags."""
    root = _near(Path(__file__).parents[3])
    flags = argparse.ArgumentParser(prog="everstep.experiments.demo", description="Train through faults, and prove it.")
    flags.add_argument("--script", type=Path, default=root / "examples" / "train_llama.py")
    flags.add_argument("--out", type=Path, default=root / ".demo", help="folder for records, run folders, the report")
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--nproc", type=int, default=2)
    flags.add_argument("--parallel", choices=["fsdp", "ddp"], default="fsdp")
    flags.add_argument("--seed", type=int, default=42, help="of the fault plan")
    flags.add_argument("--faults", type=int, default=5)
    flags.add_argument("--types", default="exception,hang,sigkill")
    flags.add_argument("--limit", type=float, default=BUDGET_S, help="seconds after which a run is ended")
    return flags


def _near(path: Path) -> Path:
    """Return a path as a person would type it from here; it stands in the report's head."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _demo(args: argparse.Namespace, clock: Clock, out: Console) -> int:
    begun = clock.now()
    folder = _folder(args)
    out.rule("1 of 3: the plain loop under torchrun")
    base = run_one("plain", folder, _torchrun(args, folder), args.limit, clock)
    out.rule("2 of 3: the fault-free twin under everstep run")
    twin = run_one("twin", folder, everstep_command(args, folder, "twin", []), args.limit, clock)
    out.rule(f"3 of 3: the same with {args.faults} faults")
    run = run_one("run", folder, everstep_command(args, folder, "run", _fault_flags(args)), args.limit, clock)
    out.rule("proof")
    findings = _findings(args, base, twin, run)
    _show_findings(out, findings)
    _show_rates(out, base, twin)
    ledger = _report(out, twin, run)
    _show_time(out, (base, twin, run), clock.now() - begun, ledger)
    held = all(finding.holds for finding in findings)
    verdict = "nothing was lost" if held else "NOT PROVEN: " + ", ".join(f.name for f in findings if not f.holds)
    out.print(f"[bold {'green' if held else 'red'}]{verdict}[/]", highlight=False)
    return int(ExitCode.DONE if held else ExitCode.FAILED)


def _folder(args: argparse.Namespace) -> Path:
    if not args.script.exists():
        raise UsageError(
            f"{args.script} does not exist; the demo runs from a clone of the repository, or name --script."
        )
    stamp = datetime.fromtimestamp(SYSTEM.wall(), UTC).strftime("%Y%m%d-%H%M%S")
    folder: Path = args.out / stamp
    folder.mkdir(parents=True)
    return folder


def _job(args: argparse.Namespace, script: Path, record: Path) -> list[str]:
    return [str(script), "--steps", str(args.steps), "--parallel", args.parallel, "--record", str(record)]


def _torchrun(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command for the plain loop: the script without its lines of resilience, beside its table of models."""
    beside = folder / "plain"
    beside.mkdir()
    stripped = plain(args.script.read_text(), args.script.with_suffix(".diff").read_text())
    script = beside / args.script.name
    script.write_text(stripped)
    for table in args.script.parent.glob("*.json"):
        shutil.copy(table, beside)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)]
    # Its own words, a line a step, go to files: this run is here for its record alone.
    return [sys.executable, *launch, "--redirects", "3", "--log-dir", str(beside / "logs"),
            *_job(args, script, folder / "plain.jsonl")]  # fmt: skip


def everstep_command(args: argparse.Namespace, folder: Path, name: str, faults: Sequence[str]) -> list[str]:
    """Return the command of a run under `everstep run`; the twin's differs in nothing but its name and `faults`."""
    launch = ["-m", "everstep.cli", "run", "--standalone", "--nproc-per-node", str(args.nproc), "--spares", "1"]
    return [sys.executable, *launch, "--run-dir", str(folder / name), *faults,
            *_job(args, args.script, folder / f"{name}.jsonl")]  # fmt: skip


def _fault_flags(args: argparse.Namespace) -> list[str]:
    return ["--fault-count", str(args.faults), "--fault-seed", str(args.seed), "--fault-types", args.types]


def run_one(name: str, folder: Path, command: Sequence[str], limit_s: float, clock: Clock) -> Ran:
    """Run one command to its end; one that is not through after `limit_s` is told to end, and then made to."""
    begun = clock.now()
    values = environ.snapshot()
    child = subprocess.Popen(command, env={"GLOO_SOCKET_IFNAME": "lo"} | values | _QUIET)
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = _end(child)
    except BaseException:
        _end(child)
        raise
    return Ran(name, folder / name, code, clock.now() - begun)


def _end(child: subprocess.Popen[bytes]) -> int:
    child.terminate()
    try:
        return child.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _findings(args: argparse.Namespace, base: Ran, twin: Ran, run: Ran) -> tuple[Finding, ...]:
    plan = run.folder / "faults.json"
    records = _ledger(run.folder)
    evidence = Evidence(
        twin=twin.tape(),
        run=run.tape(),
        steps=args.steps,
        world_size=args.nproc,
        planned=read_stored(plan)[0].faults if plan.exists() else (),
        struck=struck(records),
        started=started(records),
        exit_codes={"torchrun": base.code, "the twin": twin.code, "the run": run.code},
    )
    return (same_training(base.tape(), evidence.twin), *prove(evidence))


def _ledger(folder: Path) -> Sequence[Record]:
    return read_run(folder).records if folder.is_dir() else ()


def struck(records: Sequence[Record]) -> tuple[Struck, ...]:
    """Return which faults were let go, and when, as the ledger has it."""
    return tuple(Struck(r.event.fault, r.stamp.mono_s) for r in records if isinstance(r.event, FaultInjected))


def started(records: Sequence[Record]) -> Mapping[int, float]:
    """Return when each process began, as the agent saw it."""
    return {r.event.child_pid: r.stamp.mono_s for r in records if isinstance(r.event, ProcessStarted)}


def _show_findings(out: Console, findings: Sequence[Finding]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for finding in findings:
        mark = "[green]✓[/]" if finding.holds else "[bold red]✗[/]"
        table.add_row(mark, finding.name, finding.text if finding.holds else f"[red]{finding.text}[/]")
    out.print(table)


def _show_rates(out: Console, base: Ran, twin: Ran) -> None:
    """Print what resilience costs while nothing fails: the same step, by the record of both runs."""
    ours, theirs = step_s(twin.tape()), step_s(base.tape())
    if ours is None or theirs is None:
        out.print("step rate: too few steps were recorded to compare")
        return
    out.print(
        f"step rate without faults: {1 / ours:.1f}/s under everstep run with a snapshot every step, "
        f"{1 / theirs:.1f}/s under plain torchrun ({1e3 * ours:.1f} against {1e3 * theirs:.1f} ms, "
        f"{ours / theirs - 1:+.1%})",
        highlight=False,
    )


def _report(out: Console, twin: Ran, run: Ran) -> Ledger | None:
    page = run.folder / "report.html"
    try:
        write_page(run.folder, page, twin=twin.folder)
        ledger, _ = load(run.folder, twin=twin.folder)
    except EverstepError as error:
        out.print(f"[red]no report:[/] {error}", highlight=False)
        return None
    out.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)
    return ledger


def _show_time(out: Console, runs: Sequence[Ran], whole_s: float, ledger: Ledger | None) -> None:
    parts = [(run.name, run.seconds) for run in runs]
    parts.append(("proof and report", whole_s - sum(seconds for _, seconds in parts)))
    told = ", ".join(f"{name} {seconds:.1f} s ({seconds / whole_s:.0%})" for name, seconds in parts)
    late = f"; that is more than the {BUDGET_S:.0f} s that it should take on 2 cores" if whole_s > BUDGET_S else ""
    out.print(f"time: {whole_s:.0f} s in all: {told}{late}", highlight=False)
    if ledger is not None:
        spent = shares(ledger)
        out.print(
            "in the run with faults: " + ", ".join(f"{name} {share:.1%}" for name, share in spent), highlight=False
        )


def shares(ledger: Ledger) -> list[tuple[str, float]]:
    """Return what the ranks' time went to, largest first."""
    sums: dict[str, float] = {}
    for rank in ledger.ranks:
        for category, seconds in rank.seconds.items():
            sums[category.value] = sums.get(category.value, 0.0) + seconds
    whole = sum(rank.wall_s for rank in ledger.ranks)
    found = [(name, seconds / whole) for name, seconds in sums.items() if whole and seconds / whole >= _SHOWN]
    return sorted(found, key=lambda pair: -pair[1])


if __name__ == "__main__":
    sys.exit(main())
