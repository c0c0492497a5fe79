"""A worker's line to a small agent of its own, where no agent of ours has started it.

`open_peers` starts the watcher (and, on rank 0, the hub), waits until all ranks have come, and returns a session like
the one that an agent's worker has: `inprocess.call.Caller` runs on either.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from everstep import environ
from everstep.environ import Placement
from everstep.errors import ConfigurationError
from everstep.inprocess.peers import meeting
from everstep.inprocess.peers.core import launch as launches
from everstep.inprocess.peers.core.launch import Launch
from everstep.inprocess.peers.patience import PatientLink
from everstep.inprocess.peers.settings import Settings
from everstep.process import detach, kernel
from everstep.process.page import Page
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import LinkClosed
from everstep.recovery.session import Session
from everstep.telemetry import boot_id, say

_calls = count()
_BEAT = "peers.beat"
_WATCHDOGS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)  # fmt: skip


@dataclass
class PeerSession(Session):
    """A session whose other side is this process's own watcher. A context manager: it ends with the wrapped call."""

    launch: Launch | None = None
    hub: meeting.Hub | None = None
    over: bool = False  # the watcher has said its last word

    def __enter__(self) -> "PeerSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    def begin(self) -> None:
        """From here on the watcher is heard. Main thread."""
        self.on("peers", self._heard)
        self.lost = self._lost
        self.start()

    def _heard(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        del fds  # none come
        if message["kind"] == "peers.over":
            self.over = True

    def _lost(self) -> None:
        """The watcher is gone. Unless it had done its work, nobody would see this process hang or die (P15)."""
        if not self.over:
            os.write(2, b"everstep: the watcher of this process is gone, and nobody looks after it; it ends\n")
            os._exit(1)

    def close(self) -> None:
        """End the line; the watcher and, with the last rank, the hub end by themselves."""
        self.send({"kind": "world.left"})
        self.over = True
        self.stop()
        self.link.close()
        self.page.close()
        if self.hub is not None:
            self.hub.close()


def in_notebook() -> bool:
    """Tell whether this interpreter is a notebook's kernel."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


@dataclass(frozen=True, slots=True)
class Rider:
    """A feature that rides on this process's watcher: `module:function`, and what it is called with."""

    entry: str
    told: Mapping[str, Any]


def open_peers(
    settings: Settings | None = None, where: Placement | None = None, rider: Rider | None = None
) -> PeerSession:
    """Join the ranks of this job, which no agent of ours has started; return when all have come.

    `rider`: the same feature on every rank. Main thread. Raises ConfigurationError where they cannot meet, UsageError
    in a notebook that is one rank of several.
    """
    settings, where = settings or Settings(), where or environ.placement()
    launch = launches.read(
        environ.snapshot(), where.rank, where.world_size, launched=where.launched, notebook=in_notebook()
    )  # fmt: skip
    launch = _numbered(launch)
    _leave_faults_to_us()
    if launch.rank == 0:
        say(launches.words(launch))
    page_fd = Page.create(str(launch.rank))
    link, theirs = PatientLink.pair()
    detach.start("everstep.launcher.peers.watcher", str(os.getpid()), fds=(theirs.fileno(), page_fd))
    theirs.close()
    session = PeerSession(link, Page(page_fd), launch.job, _run_dir(), launch.rank, _incarnation(), launch=launch)
    os.close(page_fd)
    try:
        session.assigned = _meet(session, launch, settings, rider)
    except BaseException:
        session.close()
        raise
    session.begin()
    return session


def _leave_faults_to_us() -> None:
    """Torch's own watchdogs would end the survivors of a fault (EXPERIMENTS N2); a user's own values win."""
    environ.update({name: "0" for name in _WATCHDOGS if environ.get(name) is None})


def _numbered(launch: Launch) -> Launch:
    """Each wrapped call of a process is a meeting of its own."""
    return Launch(launch.kind, launch.rank, launch.world_size, launch.master, f"{launch.job}/{next(_calls)}")


def _meet(session: PeerSession, launch: Launch, settings: Settings, rider: Rider | None) -> Mapping[str, Any]:
    if launch.rank == 0:
        session.hub = meeting.Hub(launch, settings.to_json())
        hub = session.hub.start()
    else:
        hub = meeting.find(launch, settings.start_deadline_s)
    session.send(
        {
            "kind": "peers.begin",
            "hub": list(hub),
            "hub_pid": session.hub.pid if session.hub is not None else 0,
            "job": launch.job,
            "rank": launch.rank,
            "world_size": launch.world_size,
            "incarnation": str(session.incarnation),
            "master": _master(launch),
            "rider": None if rider is None else [rider.entry, dict(rider.told)],
        }
    )
    try:
        said: Mapping[str, Any] = {"kind": _BEAT}
        while said["kind"] == _BEAT:
            said, _ = session.link.receive()
    except LinkClosed:
        raise ConfigurationError("the watcher's process ended before the ranks had met; see what it printed") from None
    if said["kind"] != "peers.assigned":
        raise ConfigurationError(f"rank {launch.rank} of {launch.world_size} cannot join its job: {said['text']}")
    if isinstance(session.link, PatientLink):
        session.link.watched_by(int(said["watcher"]))
    return said


def _master(launch: Launch) -> list[Any] | None:
    """The script finds its launcher's words as they were; one by itself finds the store."""
    return None if launch.kind == "alone" else list(launch.master)


def _run_dir() -> Path:
    return Path(environ.get("EVERSTEP_RUN_DIR") or ".")


def _incarnation() -> Incarnation:
    stat = kernel.status(os.getpid())
    return Incarnation(boot_id(), os.getpid(), stat.start if stat is not None else 0)
