"""What the agent knows of one worker, and what a worker is told when it gets a rank."""

import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import ProtocolError
from everstep.launcher.agent.process import Process
from everstep.launcher.config import LaunchConfig
from everstep.launcher.core.unlike import HEARD
from everstep.process import kernel, stacks
from everstep.process.monitor import Monitoring, Request
from everstep.process.page import SIZE, Page, Reading
from everstep.recovery.core.words import Facts, Incarnation


@dataclass(eq=False)
class Worker:
    """One worker process, from its first breath to its last."""

    process: Process
    page_fd: int
    page: Page
    slot: int
    rank: int | None = None
    ready: bool = False  # it has said hello: warm, waiting for a rank
    begun: bool = False  # the user's script runs in it
    raised: bool = False  # its script has ended by an exception, and it has told of it
    attached: bool = False  # it has come to a wrapped call, and hears us
    drains: bool = False  # that call can be left between two steps
    left: bool = False  # its wrapped call is over
    done: bool = False  # its function has returned, or its unwrapped script has ended well
    probe_sent: float | None = None
    heard_s: float | None = None  # when it answered a probe about its present silence
    waiting: bool | None = None  # that answer: it waits for others
    stack: str = ""
    inside: bool = False  # that answer: it stands in the loop that turns
    held: bool = False  # for a moment, by a debugger of ours: it is not stopped by anybody else
    dump_signal: int = 0  # makes it write its stacks behind its page; 0: it listens to none
    asked_for: int = 0  # requests of its script's that have been heard
    last: Reading | None = None
    logs: "Logs | None" = None
    attempt: int = 0
    lasting: frozenset[int] = frozenset()  # daemons that its script had let go of before the wrapped call
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    _requested: Request | None = None
    _monitoring: Monitoring | None = None

    @property
    def incarnation(self) -> Incarnation:
        """Who it is; known from the instant it was born."""
        if self.process.incarnation is None:
            raise ProtocolError(f"{self.process.name} is asked who it is before it was born: a bug of the agent")
        return self.process.incarnation

    def facts(self, node: str, *, fresh: bool, dirt: tuple[str, ...] = ()) -> Facts:
        """What it brings to a roster."""
        return Facts(node=node, slot=self.slot, fresh=fresh, former_rank=self.rank, dirt=dirt)

    def look(self) -> Reading:
        """Read its page; after its end, what stood there last."""
        return self.page.read() if self.last is None else self.last

    @property
    def monitoring(self) -> Monitoring | None:
        """What its script's own rank monitor has said; after its end, what stood there last."""
        return self.page.monitor.read() if self.last is None else self._monitoring

    @property
    def marked_s(self) -> float | None:
        """Its last sign of progress in monotonic seconds; None where it has given none."""
        said = self.monitoring
        return max(self.look().mark_s, said.event_s if said is not None else 0.0) or None

    @property
    def speaker(self) -> int:
        """The process whose monitor it is: a child of ours where another program begins the script."""
        said = self.monitoring
        if said is None or said.pid == self.process.pid:
            return self.process.pid
        known = kernel.status(said.pid)  # of the same session: numbers are used again
        return said.pid if known is not None and known.session == self.process.pid else self.process.pid

    @property
    def dump_by(self) -> int:
        """The signal that makes it write its stacks behind its page; 0: there is none that would not end it."""
        said = self.monitoring
        number = self.dump_signal or (said.signal if said is not None else 0)
        return number if signal.SIGRTMIN <= number <= signal.SIGRTMAX else 0

    def dump(self) -> bool:
        """Have it write its stacks behind its page; False where it listens to no signal, or has ended."""
        number = self.dump_by if self.last is None else 0
        if number:
            stacks.clear(self.page_fd, SIZE)
            kernel.kill(self.speaker, number)
        return number > 0

    @property
    def requested(self) -> Request | None:
        """What its script asked of us last."""
        return self.page.monitor.requested if self.last is None else self._requested

    def close(self) -> None:
        """Let the page go."""
        self._requested, self._monitoring = self.page.monitor.requested, self.page.monitor.read()
        self.last = self.page.read()
        self.page.close()
        os.close(self.page_fd)


@dataclass
class Logs:
    """Where one worker's streams go, in torchrun's layout. Empty: the console."""

    folder: Path
    stdout: str = ""
    stderr: str = ""
    tee_stdout: bool = False
    tee_stderr: bool = False

    @property
    def error_file(self) -> str:
        """What torch's `@record` writes into."""
        return "" if str(self.folder) == os.devnull else str(self.folder / "error.json")


WORDS: Mapping[str, Mapping[str, type]] = {
    "hello": {},
    "listens": {"signal": int},
    "attached": {},
    "left": {},
    "fault": {"fault": str, "text": str, "generation": int},
    "arrived": {"generation": int, "dirt": list},
    "completed": {"generation": int},
    "heard": {"waiting": bool, "stack": str, "inside": bool},
    "replace": {"text": str},
    "refused": {"text": str, "code": int},
    "asked": {"text": str, "code": int},
    "noticed": {"text": str},
    "script_failed": {"text": str, "hopeless": bool},
}
"""What a worker may say to its agent. It is the user's process: what it says is read as that."""


def well_formed(verb: str, message: Mapping[str, Any]) -> bool:
    """Tell whether a message is one that a worker may say."""
    return verb in WORDS and all(isinstance(message.get(name), kind) for name, kind in WORDS[verb].items())


def positive(value: object) -> float | None:
    """Return a number that a worker has said, where it is one above 0."""
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


NO_LIMIT = 2**31 - 1
"""What a script reads where no number of restarts ends the job; torchrun always gives one."""

PREPARE = "everstep.training:prepare"
"""What makes a worker hear its agent before the script's first line; by name, since it lies a layer above."""

_STREAMS = {"0": 0, "1": 1, "2": 2, "3": 3}


def stream_of(text: str, local_rank: int) -> int:
    """Read torchrun's `-r`/`-t`: `3` for all ranks, or `0:1,1:3`. Bits: 1 stdout, 2 stderr."""
    if text in _STREAMS:
        return _STREAMS[text]
    found = dict(part.split(":", 1) for part in text.split(",") if ":" in part)
    return _STREAMS.get(found.get(str(local_rank), "0"), 0)


def log_root(config: LaunchConfig, run_dir: Path) -> Path:
    """Return where the logs of this run go: as with torchrun a new folder in `--log-dir`, named after the job.

    One that cannot be made is found by `plan_logs`, for each worker.
    """
    if not config.log_dir:
        return run_dir / "logs"
    if config.log_dir == os.devnull:
        return Path(os.devnull)
    try:
        os.makedirs(config.log_dir, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{config.run_id}_", dir=config.log_dir))
    except OSError:
        return Path(config.log_dir) / config.run_id


def plan_logs(config: LaunchConfig, root: Path, attempt: int, local_rank: int) -> Logs:
    """Choose the files of one worker's start; a folder that exists is never written into again (LA-25)."""
    if str(root) == os.devnull:  # torchrun's way to say that nothing is to be written
        return Logs(root)
    folder = root / f"attempt_{attempt}" / str(local_rank)
    number = 1
    while folder.exists():
        folder = root / f"attempt_{attempt}.{number}" / str(local_rank)
        number += 1
    folder.mkdir(parents=True)
    tee = stream_of(config.tee, local_rank)
    redirect = stream_of(config.redirects, local_rank) | tee | (3 if config.cycle_log else 0)
    shown = {int(r) for r in config.local_ranks_filter.split(",") if r.strip()}
    hidden = bool(shown) and local_rank not in shown
    return Logs(
        folder=folder,
        stdout=str(folder / "stdout.log") if redirect & 1 else (os.devnull if hidden else ""),
        stderr=str(folder / "stderr.log") if redirect & 2 else (os.devnull if hidden else ""),
        tee_stdout=bool(tee & 1) and not hidden,
        tee_stderr=bool(tee & 2) and not hidden,
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands: in the world, on its node, and its node among the nodes."""

    rank: int
    world_size: int
    local: int
    local_size: int
    group: int = 0
    groups: int = 1


def environment_of(
    base: Mapping[str, str],
    config: LaunchConfig,
    standing: Standing,
    restarts: int,
    store: tuple[str, int],
    error_file: str,
) -> dict[str, str]:
    """The variables that torchrun would set for this rank, over the agent's own."""
    found = dict(base) | {
        "RANK": str(standing.rank),
        "LOCAL_RANK": str(standing.local),
        "GROUP_RANK": str(standing.group),
        "ROLE_RANK": str(standing.rank),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(standing.local_size),
        "WORLD_SIZE": str(standing.world_size),
        "GROUP_WORLD_SIZE": str(standing.groups),
        "ROLE_WORLD_SIZE": str(standing.world_size),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(NO_LIMIT if config.max_restarts is None else config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": str(config.flags.get("signals_to_handle") or ",".join(HEARD)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0" if config.wrapped else "1"),
    }
    if config.nproc > 1:
        found["OMP_NUM_THREADS"] = base.get("OMP_NUM_THREADS") or "1"
    if config.wrapped:
        # Torch's own watchdogs would end the survivors of a fault (EXPERIMENTS N2); a user's own values win. What they
        # dump on an error is announced in the store, to all later groups too, and keeps those from ending for minutes.
        found = {f"TORCH_NCCL_{name}": "0" for name in _WATCHDOGS} | found
    return found


_WATCHDOGS = ("ENABLE_MONITORING", "RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT")


def _threads(environment: Mapping[str, str]) -> int:
    """Of each rank's pools, as the variable says it; 0 where nothing does."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(first) if first.isdigit() else 0


_MACRO = re.compile(r"\$\$|\$\{local_rank\}|\$local_rank\b", re.ASCII)


def arguments_of(config: LaunchConfig, local_rank: int) -> list[str]:
    """Return the script's arguments with torchrun's one macro filled in; `$$` stays, where torchrun makes `$` of it."""
    return [_MACRO.sub(lambda found: found[0] if found[0] == "$$" else str(local_rank), a) for a in config.arguments]


def begin_message(
    config: LaunchConfig,
    worker: Worker,
    environment: Mapping[str, str],
    assigned: Mapping[str, Any],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """What a fresh process needs to become a rank; with a `program` it execs that, else it runs the script itself."""
    assert worker.logs is not None
    return {
        "kind": "world.begin",
        "script": config.script,
        "arguments": list(arguments),
        "module": config.module,
        "program": [config.script, *arguments] if config.no_python else None,
        "environment": dict(environment),
        "stdout": worker.logs.stdout,
        "stderr": worker.logs.stderr,
        "slot": worker.slot,
        "rank": worker.rank,
        "threads": _threads(environment),
        "cold": config.cold,
        "reclaim": config.reclaim if worker.attempt and not config.wrapped else None,
        "assigned": dict(assigned),
        "prepare": PREPARE if config.wrapped else "",
    }
