"""What `everstep run` was asked for: a frozen value with its own law. No torch here.

Made from the flags as the zygote's parser read them; every refusal says what would be accepted.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.errors import ConfigurationError, UsageError
from everstep.launcher.control.core.place import LOOPBACK, Place, place_of
from everstep.launcher.core.unlike import grace_s
from everstep.launcher.nodes.core.endpoint import Endpoint, backend_of, endpoint_of
from everstep.launcher.nodes.core.lemon import MOST, WITHIN_S
from everstep.launcher.nodes.core.register import WIRE
from everstep.recovery.core.words import Policy
from everstep.telemetry import more_room

_MOST_FILES_READ = 200
GRACE_S = 15.0
UNNAMED = "none"
"""torchrun's default for --rdzv-id."""
REPLACEMENT_S = 60.0
"""So long is a new process awaited in a lost rank's place where the world may shrink: forking one takes 0.1 s, a new
zygote some seconds, and one that cannot fork is asked again for 30 s."""
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*,?")
_RANKS = re.compile(r"(\s*\d+\s*(,|$))*")
MARK = re.compile(r"\beverstep\b")
MONITORS = re.compile(
    r"\bimport\s+everstep\.fault_tolerance\b|\bfrom\s+everstep(\.fault_tolerance\b|\s+import\s+fault_tolerance\b)"
)
OTHERS = re.compile(
    r"\beverstep\.(?!fault_tolerance\b)\w|\bfrom\s+everstep\s+import\s+(?!fault_tolerance[ \t]*(as\s|\#|$))",
    re.MULTILINE,
)
"""What names more of us than rank monitors; a sentence that ends with "everstep." does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One node's launch. Times are seconds."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    nproc: int = 1
    nnodes: int = 1  # at most at work
    least_nodes: int | None = None  # with how few of them it may begin and go on; None: it takes all
    spare_nodes: int = 0  # beyond them, that wait
    lemon_faults: int = MOST  # so many of one node's ranks, within so long, leave it out; 0: never
    lemon_window_s: float = WITHIN_S
    health_check: str | None = None  # a command, before this node joins
    base_dir: Path | None = None  # the run folder as it was named: what a job remembers lies there
    at_work: tuple[str, ...] = ()  # the nodes that have begun with ranks, when they are known
    endpoint: Endpoint | None = None  # where the agents of several nodes meet
    local_addr: str | None = None
    spares: int = 1
    max_restarts: int | None = None
    min_world_size: int | None = None
    replacement_timeout_s: float | None = None
    death_timeout_s: float | None = None
    gpu_memory_reclaim_s: float = 50.0
    gpu_memory_tolerance_mb: float = 512.0
    grace_s: float = GRACE_S
    soft_timeout_s: float | None = None
    hard_timeout_s: float | None = None
    first_timeout_s: float | None = None
    preload: tuple[str, ...] = ()
    cold: bool = False  # each worker is a new interpreter
    master_port: int | None = None
    role: str = "default"
    run_id: str = UNNAMED
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str = ""
    stdout_filters: tuple[str, ...] = ()  # lines of a shown stream that hold one of them are gathered in a file too
    stderr_filters: tuple[str, ...] = ()
    cycle_log: tuple[str, str] | None = None  # one file a start for all that is printed: what its number stands between
    wrapped: bool = True  # the script, or what it imports from beside it, names everstep
    control: Place | None = LOOPBACK  # where operators are answered; None: nowhere
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])  # all of them, for the features that added some

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise UsageError(f"--nproc-per-node {self.nproc}: a world has at least one rank.")
        if self.spares < 0:
            raise UsageError(f"--spares {self.spares}: give 0 or more.")
        if self.spare_nodes < 0:
            raise UsageError(f"--spare-nodes {self.spare_nodes}: give 0 or more.")
        if self.lemon_faults < 0 or not self.lemon_window_s > 0:
            raise UsageError(
                f"--lemon-faults {self.lemon_faults} --lemon-window {self.lemon_window_s:g}: give a number of faults, "
                "0 to leave no node out, and seconds, more than 0."
            )
        if self.max_restarts is not None and self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts}: give 0 or more, or leave it out.")
        self._check_shrinking()
        if self.module and self.no_python:
            raise UsageError(
                "--module and --no-python contradict each other: one runs a Python module, the other none."
            )
        self._check_times()
        self._check_streams()

    def _check_shrinking(self) -> None:
        least, limit = self.min_world_size, self.replacement_timeout_s
        most = self.most_ranks
        if least is not None and not 1 <= least <= most:
            made = "--nproc-per-node" if self.nnodes == 1 else "--nnodes times --nproc-per-node"
            raise UsageError(
                f"--min-world-size {least}: give 1 to {most} ({made}), or leave it out for a world that keeps its size."
            )
        if least is not None and self.least_nodes is not None and least < self.least_nodes * self.nproc:
            raise UsageError(
                f"--min-world-size {least} with --nnodes {self.nodes_text}: so many nodes have "
                f"{self.least_nodes * self.nproc} ranks at least. Give that or more, or leave it out."
            )
        if limit is not None and not 0 <= limit < float("inf"):
            raise UsageError(f"--replacement-timeout {limit:g}: seconds, 0 or more.")
        if self.death_timeout_s is not None and not 0 < self.death_timeout_s < float("inf"):
            raise UsageError(f"--death-timeout {self.death_timeout_s:g}: seconds, more than 0.")
        for name in ("gpu_memory_reclaim_s", "gpu_memory_tolerance_mb"):
            if not 0 <= getattr(self, name) < float("inf"):
                flag = f"--{name.replace('_', '-')}".replace("reclaim-s", "reclaim-timeout")
                raise UsageError(f"{flag} {getattr(self, name):g}: give 0 or more.")
        if least is not None and not self.wrapped:
            raise UsageError(
                f"--min-world-size {least}: the ranks that are left go on in a wrapped function, and neither "
                f"{self.script} nor what it imports from beside it names everstep. Wrap the training function in "
                "@everstep.inprocess.Wrapper, or leave the flag out."
            )

    @property
    def world_size(self) -> int:
        """How many ranks the job starts with, on all nodes; as many as it may have until that is known."""
        return len(self.at_work) * self.nproc if self.at_work else self.most_ranks

    @property
    def most_ranks(self) -> int:
        """How many ranks the job may have."""
        return self.nnodes * self.nproc

    @property
    def several(self) -> bool:
        """True where agents of other nodes may come."""
        return self.nnodes + self.spare_nodes > 1

    @property
    def nodes_text(self) -> str:
        """As `--nnodes` has it."""
        return str(self.nnodes) if self.least_nodes is None else f"{self.least_nodes}:{self.nnodes}"

    @property
    def least_ranks(self) -> int | None:
        """With how few the job goes on where lost ones are not replaced; None: it keeps its size."""
        by_nodes = None if self.least_nodes is None else self.least_nodes * self.nproc
        return by_nodes if self.min_world_size is None else self.min_world_size

    @property
    def store_place(self) -> tuple[str, int]:
        """Where this node's store listens: on one node at the port that was asked for, else at the end point's side."""
        if not self.several:
            return "127.0.0.1", self.master_port or 0
        return self.local_addr or "127.0.0.1", 0

    def terms(self, version: str) -> dict[str, Any]:
        """What all nodes of one job have in common."""
        return {
            "version": version, "wire": WIRE, "job": self.run_id,
            # what a job without a name is known by: its end point may be another's too
            "script": Path(self.script).name if self.run_id == UNNAMED else None, "nnodes": self.nodes_text,
            "spare_nodes": self.spare_nodes, "nproc": self.nproc, "wrapped": self.wrapped,
            "least": self.min_world_size, "restarts": self.max_restarts,
        }  # fmt: skip

    @property
    def reclaim(self) -> list[float] | None:
        """For how many seconds the next attempt waits for device memory, and how many MB of it count as free."""
        return [self.gpu_memory_reclaim_s, self.gpu_memory_tolerance_mb] if self.gpu_memory_reclaim_s else None

    @property
    def policy(self) -> Policy:
        """What the world machine is to know of it."""
        limit = self.replacement_timeout_s
        if limit is None and self.least_ranks is not None:
            limit = REPLACEMENT_S
        known = Policy(
            world_size=self.most_ranks, local_world_size=self.nproc, shares=self._shares, by_node=self.several,
            whole=self.least_nodes is not None or self.spare_nodes > 0, deaf=not self.wrapped,
            max_restarts=self.max_restarts,
            min_world_size=self.least_ranks, replace_deadline_s=limit,
        )  # fmt: skip
        if self.death_timeout_s is not None:
            known = replace(known, death_deadline_s=self.death_timeout_s)
        return replace(known, start_deadline_s=max(known.start_deadline_s, limit or 0.0))

    @property
    def _shares(self) -> tuple[tuple[str, int], ...]:
        return tuple((node, self.nproc) for node in self.at_work)

    def _check_times(self) -> None:
        soft, hard = self.soft_timeout_s, self.hard_timeout_s
        if soft is not None and hard is not None and not 0 < soft < hard:
            raise UsageError(f"--soft-timeout {soft:g} and --hard-timeout {hard:g}: 0 < soft < hard is expected.")
        for limit in (soft, hard, self.first_timeout_s):
            if limit is not None and limit <= 0:
                raise UsageError(f"a timeout of {limit:g} s: give seconds, more than 0, or leave it out to be learned.")
        if self.grace_s < 0:
            raise UsageError(f"--grace {self.grace_s:g}: seconds, 0 or more.")

    def _check_streams(self) -> None:
        for flag, text in (("redirects", self.redirects), ("tee", self.tee)):
            if not _STREAMS.fullmatch(text):
                raise UsageError(f"--{flag} {text!r}: give 0 to 3 for all ranks, or pairs like 0:1,1:3.")
        if not _RANKS.fullmatch(self.local_ranks_filter):
            raise UsageError(f"--local-ranks-filter {self.local_ranks_filter!r}: give local ranks like 0,2.")
        for name, filters, bit in (("stdout", self.stdout_filters, 1), ("stderr", self.stderr_filters, 2)):
            if filters and not any(int(text.rpartition(":")[2] or 0) & bit for text in self.tee.split(",")):
                raise UsageError(
                    f"--duplicate-{name}-filters gathers lines of what --tee shows, and no rank's {name} is shown; "
                    f"add for example --tee {bit}."
                )


def from_flags(flags: Mapping[str, Any]) -> LaunchConfig:
    """Check the parsed flags against one another and against the disk."""
    module, no_python, script = bool(flags["module"]), bool(flags["no_python"]), str(flags["training_script"])
    if flags.get("run_path"):  # torchrun gives it precedence; every script is run as it says here
        module = no_python = False
    if not module and not no_python and not _main_of(script).is_file():
        raise UsageError(f"the script {script!r} does not exist (looked in {Path.cwd()}); use -m for a module.")
    if flags.get("log_dir") and Path(flags["log_dir"]).is_file():
        raise UsageError(f"--log-dir {flags['log_dir']} is a file; name a folder.")
    backend_of(flags)
    wrapped = not no_python and mentions_everstep(script, module=module)
    spares = flags.get("spares")
    spares = None if spares is None else int(spares)
    if spares and not wrapped:
        raise UsageError(
            f"--spares {spares}: a spare takes over a rank of a wrapped function, and neither {script} nor what it "
            "imports from beside it names everstep. Wrap the training function in @everstep.resilient, or leave "
            "--spares out."
        )
    preload = str(flags.get("preload") or "")
    return LaunchConfig(
        script=script,
        arguments=tuple(flags["training_script_args"]),
        module=module,
        no_python=no_python,
        nproc=int(flags["nproc"]),
        nnodes=int(flags["nodes"]),
        least_nodes=flags.get("least_nodes"),
        spare_nodes=int(flags.get("spare_nodes") or 0),
        lemon_faults=int(flags.get("lemon_faults", MOST)),
        lemon_window_s=float(flags.get("lemon_window", WITHIN_S)),
        health_check=flags.get("health_check"),
        endpoint=endpoint_of(flags) if flags["nodes"] + int(flags.get("spare_nodes") or 0) > 1 else None,
        local_addr=flags.get("local_addr"),
        spares=(1 if wrapped else 0) if spares is None else spares,
        max_restarts=_max_restarts(flags, wrapped),
        min_world_size=flags.get("min_world_size"),
        replacement_timeout_s=flags.get("replacement_timeout"),
        death_timeout_s=flags.get("death_timeout"),
        gpu_memory_reclaim_s=float(flags.get("gpu_memory_reclaim_timeout", 50.0)),
        gpu_memory_tolerance_mb=float(flags.get("gpu_memory_tolerance_mb", 512.0)),
        grace_s=grace_s(flags, GRACE_S),
        soft_timeout_s=flags.get("soft_timeout"),
        hard_timeout_s=flags.get("hard_timeout"),
        first_timeout_s=flags.get("first_timeout"),
        preload=tuple(name for name in preload.split(",") if name and name != "none"),
        cold=preload == "none",
        master_port=flags.get("master_port"),
        role=str(flags["role"]),
        run_id=str(flags["rdzv_id"]),
        log_dir=flags.get("log_dir"),
        redirects=str(flags["redirects"]),
        tee=str(flags["tee"]),
        local_ranks_filter=str(flags["local_ranks_filter"]),
        stdout_filters=tuple(flags.get("duplicate_stdout_filters") or ()),
        stderr_filters=tuple(flags.get("duplicate_stderr_filters") or ()),
        cycle_log=(flags["cycle_log"][0], flags["cycle_log"][1]) if flags.get("cycle_log") else None,
        wrapped=wrapped,
        control=place_of(flags, environ.get("EVERSTEP_CONTROL_ENDPOINT")),
        flags=dict(flags),
    )


def _max_restarts(flags: Mapping[str, Any], wrapped: bool) -> int | None:
    """Left out it may mean a number of its own where nothing but restarts keeps the job: `ft_launcher`'s 0."""
    given: int | None = flags["max_restarts"]
    return flags.get("max_restarts_unwrapped") if given is None and not wrapped else given


def mentions_everstep(script: str, *, module: bool = False) -> bool:
    """True when the script, or a module it imports from beside it, names everstep, and not for a rank monitor alone.

    A scan of texts, nothing is run; what cannot be read or found counts as naming it, so that a doubt keeps the spare.
    """
    try:
        start = _source_of(script) if module else _main_of(script)
    except (OSError, SyntaxError, ValueError):
        return True
    if start is None:
        return True
    if start.is_file() and zipfile.is_zipfile(start):
        return _in_archive(start)
    seen: set[Path] = set()
    waiting = [start]
    while waiting and len(seen) < _MOST_FILES_READ:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text(errors="replace")
            if MARK.search(text) and not _only_monitors(text):
                return True
            waiting += _imported_from_beside(path, text)
        except (OSError, SyntaxError, ValueError):
            return True
    return bool(waiting)


def _in_archive(path: Path) -> bool:
    """Tell whether a module in an archive names everstep; a doubt counts as naming it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            texts = [archive.read(name).decode(errors="replace") for name in names[:_MOST_FILES_READ]]
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        return True
    return len(names) > _MOST_FILES_READ or any(MARK.search(text) and not _only_monitors(text) for text in texts)


def _only_monitors(text: str) -> bool:
    """Tell whether all that a file imports of us is `everstep.fault_tolerance`, which wraps no function."""
    if not MONITORS.search(text) or OTHERS.search(text):
        return False
    named = {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}
    return "everstep" not in named


def _main_of(script: str) -> Path:
    """Return what runs where a script is named: of a folder its `__main__.py`, as the interpreter does."""
    return Path(script, "__main__.py") if Path(script).is_dir() else Path(script)


def _source_of(module: str) -> Path | None:
    for top in (Path.cwd(), *map(Path, sys.path)):
        base = top.joinpath(*module.split("."))
        for candidate in (base.with_suffix(".py"), base / "__main__.py"):
            if candidate.is_file():
                return candidate
    return None


def _imported_from_beside(path: Path, text: str) -> list[Path]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)
    found: list[Path] = []
    for name in names:
        base = path.parent.joinpath(*name.split("."))
        found += [p for p in (base.with_suffix(".py"), base / "__init__.py") if name and p.is_file()]
    return found


def writable(folder: Path) -> Path:
    """Create `folder` where needed and return it; ConfigurationError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".everstep-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be written: {error.strerror}. {more_room(error)}Name another folder with --run-dir."
        ) from None
    return folder
