"""One run of the benchmark's job: how it is started, how long it is waited for, and how it is ended.

Rule 1: a run is waited for as long as its ranks come to something. When none has for `limit_s`, the run is ended, and
        that is its outcome: an endless hang costs the limit once, not the benchmark.
Rule 2: everything that a run has started carries its token in the environment. What is still there after the run is
        counted, and ended by its pid.
"""

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from everstep import environ
from everstep.clock import SYSTEM, Clock
from everstep.errors import UsageError
from everstep.experiments.core.figures import NVRX, Case
from everstep.experiments.core.tapes import Ending, Run, judge, read

VICTIM = Path(__file__).parent / "alone" / "victim.py"
NATIVE = "everstep"
MEETS = ("own", "plain")
LAUNCHERS = ("bare", "everstep", "torchrun")
TOKEN = "EVERSTEP_BENCH_RUN"
LOOK_S = 0.05
ENDING_S = 20.0
LINGER_S = 5.0
HARD_LATER_S = 10.0
_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "error"}


@dataclass(frozen=True, slots=True)
class Impl:
    """An implementation, and how its runs are started."""

    module: str
    python: str
    launcher: str
    meet: str = "own"

    def to_json(self) -> dict[str, str]:
        """As a row names it."""
        return {"impl": self.module, "launcher": self.launcher, "meet": self.meet}

    def __str__(self) -> str:
        return f"{self.module} ({self.launcher})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is the same for all runs."""

    faults: int = 5
    steps: int = 20
    injured: int = 1
    spares: int = 1
    soft_s: float | None = None
    limit_s: float = 120.0  # of silence, once a rank has trained a step
    start_s: float = 300.0  # until then: interpreters and torch load, ranks wait for one another


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run is ended, in seconds: of silence before and after the first step, and whatever its ranks do."""

    start_s: float = 300.0
    silent_s: float = 120.0
    most_s: float = math.inf


def choose(module: str, python: str | None = None, launcher: str | None = None, meet: str | None = None) -> Impl:
    """Fill in what was left out: NVRx from `.venv-peers` and bare, as its users run it; ours under `everstep run`.

    Raises UsageError for an interpreter that is not there or has not got the module.
    """
    ours = module.split(".")[0] == NATIVE
    if python is None:
        python = sys.executable if module != NVRX else _peers()
    if shutil.which(python) is None:
        raise UsageError(f"--python {python}: there is no such interpreter; give the path of one that has {module}.")
    launcher = launcher or ("everstep" if ours else "bare")
    if launcher not in LAUNCHERS:
        raise UsageError(f"--launcher {launcher}: give one of {', '.join(LAUNCHERS)}.")
    meet = meet or MEETS[0]
    if meet not in MEETS:
        raise UsageError(f"--meet {meet}: give one of {', '.join(MEETS)}.")
    found = subprocess.run([python, "-c", _FIND, module], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        reason = found.stderr.strip().rpartition("\n")[2] or f"exit code {found.returncode}"
        raise UsageError(f"{python} cannot find {module} ({reason}); name one that can: --python {module}=PATH.")
    return Impl(module, python, launcher, meet)


_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def _peers() -> str:
    for folder in (Path.cwd(), *Path(__file__).parents):
        python = folder / ".venv-peers" / "bin" / "python"
        if python.exists():
            return str(python)
    raise UsageError(
        "NVRx is not here: `make peers` in a clone of the repository makes an environment that has it; or name one: "
        f"--python {NVRX}=PATH."
    )


def commands(impl: Impl, case: Case, plan: Plan, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of a run, each with what it adds to the environment."""
    ports = free_ports(2)
    words = [
        str(VICTIM), "--impl", impl.module, "--tape", str(folder), "--ranks", str(case.ranks), "--fault", case.fault,
        "--faults", str(plan.faults), "--injured", str(min(plan.injured, case.ranks - 1)), "--steps", str(plan.steps),
        "--backend", case.backend, "--meet", impl.meet, "--ports", ",".join(map(str, ports)),
        *(["--tuned"] if case.tuned else []), *(["--soft", str(plan.soft_s)] if plan.soft_s is not None else []),
    ]  # fmt: skip
    soft, hard = (plan.soft_s, plan.soft_s + HARD_LATER_S) if plan.soft_s is not None else (None, None)
    limits = [] if soft is None else ["--soft-timeout", str(soft), "--hard-timeout", str(hard)]
    return launched(impl, words, case.ranks, folder, "--spares", str(plan.spares), *limits)


def launched(
    impl: Impl, words: Sequence[str], ranks: int, folder: Path, *flags: str
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands that start `words` on each rank; `flags` are for `everstep run` alone."""
    (port,) = free_ports(1)
    count = str(ranks)
    if impl.launcher == "torchrun":
        own = ["-m", "torch.distributed.run", "--nproc-per-node", count, "--master-port", str(port)]
        return [([impl.python, *own, *words], {})]
    if impl.launcher == "everstep":
        own = ["-m", "everstep", "run", "--nproc-per-node", count, *flags, "--run-dir", str(folder / "run")]
        return [([impl.python, *own, *words], {})]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [([impl.python, *words], {**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(socket.socket()) for _ in range(count)]
        for line in lines:
            line.bind(("127.0.0.1", 0))
        return [line.getsockname()[1] for line in lines]


def run(impl: Impl, case: Case, plan: Plan, folder: Path, clock: Clock = SYSTEM) -> tuple[Run, int]:
    """Do one run in `folder`; return what became of it, and how many of its processes had to be ended after it."""
    limits = Limits(start_s=plan.start_s, silent_s=plan.limit_s)
    ending, left = drive(commands(impl, case, plan, folder), folder, limits, clock)
    return judge(read(tapes(folder)), ending), left


def drive(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path, limits: Limits, clock: Clock = SYSTEM
) -> tuple[Ending, int]:
    """Start the commands, wait for their end or a limit, end what is left; return how it ended and how much that was.

    One command is a launcher, which is asked to end first; of several each is a rank.
    """
    folder.mkdir(parents=True)
    token = f"{os.getpid()}-{folder.name}"
    children: list[subprocess.Popen[bytes]] = []
    begun = clock.now()
    try:
        for number, (words, more) in enumerate(commands):
            values = {"GLOO_SOCKET_IFNAME": "lo"} | environ.snapshot() | _QUIET | {TOKEN: token} | dict(more)
            with (folder / f"out-{number}.txt").open("wb") as out:
                child = subprocess.Popen(
                    words, env=values, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            children.append(child)
        silent = _wait(children, folder, limits, clock)
        ending = Ending(clock.now() - begun, tuple(child.poll() for child in children), silent)
    finally:
        _end(children, gently=not any("RANK" in more for _, more in commands))
        left = _clear(token, clock)
    return ending, left


@contextlib.contextmanager
def alive(command: Sequence[str], folder: Path) -> Generator[subprocess.Popen[bytes]]:
    """Have a launcher run meanwhile; ended, with all that it has left, afterwards."""
    token = f"{os.getpid()}-{folder.name}"
    values = {"GLOO_SOCKET_IFNAME": "lo"} | environ.snapshot() | _QUIET | {TOKEN: token}
    with (folder / "out.txt").open("wb") as out:
        child = subprocess.Popen(
            command, env=values, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield child
    finally:
        _end([child], gently=True)
        _clear(token, SYSTEM)


def live(command: Sequence[str], folder: Path, limit_s: float = 300.0) -> tuple[float, float | None]:
    """Run a launcher; return when it was started and when it had ended, to the moment: None where it had to be."""
    begun = SYSTEM.now()
    with alive(command, folder) as child:
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return begun, None
        return begun, SYSTEM.now()


def tapes(folder: Path) -> Iterator[str]:
    """Yield what the processes of a run have written."""
    for path in sorted(folder.glob("tape-*.jsonl")):
        yield path.read_text(errors="replace")


def _wait(children: Sequence[subprocess.Popen[bytes]], folder: Path, limits: Limits, clock: Clock) -> float | None:
    """Wait until all have ended: None. Or for as long as a limit allows: that."""
    begun = since = clock.now()
    seen, trains = -1, False
    while any(child.poll() is None for child in children):
        size = sum(path.stat().st_size for path in folder.glob("tape-*.jsonl"))
        if size != seen:
            seen, since = size, clock.now()
            trains = trains or any(mark.what == "step" for mark in read(tapes(folder)))
        limit = limits.silent_s if trains else limits.start_s
        if clock.now() - since > limit:
            return limit
        if clock.now() - begun > limits.most_s:
            return limits.most_s
        clock.sleep(LOOK_S)
    return None


def _end(children: Sequence[subprocess.Popen[bytes]], *, gently: bool) -> None:
    """End what still runs; a launcher is asked first, so that it can end its own."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
    for child in children:
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _clear(token: str, clock: Clock) -> int:
    """Give what a run has left behind a moment to end by itself; then end it, and say how much that was."""
    deadline = clock.now() + LINGER_S
    while (left := _carrying(token)) and clock.now() < deadline:
        clock.sleep(LOOK_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(left)


def _carrying(token: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            values: Mapping[str, str] = process.environ()
            if values.get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
