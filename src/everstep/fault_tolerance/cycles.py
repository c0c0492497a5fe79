"""What `ft_launcher` keeps of each cycle, a start of all workers: whether it made progress, a file that tells of it.

`--ft-checkpoint-iteration-file` is read after each cycle (`core.progress` judges); `--ft-cycle-info-dir` gets a file a
cycle from the node that holds rank 0, in NVRx's form (HEAD, `fault_tolerance/cycle_info_writer.py`), with addresses for
nodes. Both by a helper process: storage that hangs costs the knowledge, never the job.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from everstep import environ, ranks
from everstep.clock import Clock
from everstep.errors import EverstepError, ExitCode
from everstep.events import Notice
from everstep.fault_tolerance.clerk import ENTRY
from everstep.fault_tolerance.core import progress
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core.words import Roster

LAST_S = 5.0
"""The last file of a job is waited for at most so long."""


class NoProgress(EverstepError):
    """Restarts lead nowhere; the job is not to be started again as it is."""

    exit_code = ExitCode.DO_NOT_REQUEUE


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for; None or empty: it was not."""

    iteration_file: str | None = None
    track: progress.Track = field(default_factory=progress.Track)
    info_dir: str | None = None
    log_file: tuple[str, str] | None = None  # of each cycle: what its number stands between

    @property
    def wanted(self) -> bool:
        """True where there is something to do."""
        return bool((self.iteration_file and self.track.most > 0) or self.info_dir)


def settings_of(given: Mapping[str, Any], log_file: tuple[str, str] | None) -> Settings:
    """Read what the flags have left."""
    track = progress.Track(least=given.get("least", 1), most=given.get("most", 0))
    return Settings(given.get("iteration_file"), track, given.get("info_dir"), log_file)


class Cycles:
    """Companion `ft-cycles`."""

    prefix = "ft-cycles"

    def __init__(self, settings: Settings) -> None:
        self._settings, self._track = settings, settings.track
        self._job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID") or ""
        self._attempt = int(environ.get("SLURM_RESTART_CNT") or 0)
        self._child: Child | None = None
        self._open: dict[str, Any] | None = None  # the file of the present cycle, where this node writes it
        self._present: Mapping[str, str] = {}
        self._asked_s: float | None = None  # when the last file was ordered
        self._done = False
        self._told = False

    @property
    def link(self) -> str:
        """Path of the link that leads to the present cycle's file."""
        return os.path.join(os.path.abspath(self._settings.info_dir or ""), self._link)

    @property
    def _link(self) -> str:
        return f"cycle_info.{self._job}.current"

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host: NodeHost = host  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]  # a node's own
        self._clock = host.clock
        self._child = host.spawn("ft-clerk", ENTRY, {})
        self._read(-1)

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`."""
        self._present = nodes

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`."""

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`. Raises NoProgress."""
        del child, fds
        if message["kind"] == "written":
            if message["text"] and not self._told:
                self._told = True
                self._host.emit(Notice(text=f"--ft-cycle-info-dir: {message['text']}", level="warning"))
            self._done = self._done or bool(message["last"])
            self._host.recheck()
        elif message["kind"] == "read":
            self._seen(message["generation"], message["iteration"])

    def _seen(self, generation: int, iteration: int | None) -> None:
        if generation < 0:
            self._track = progress.begun(self._track, iteration)
            return
        if iteration is None and not self._told:
            self._told = True
            text = f"--ft-checkpoint-iteration-file {self._settings.iteration_file} has no iteration yet: not counted"
            self._host.emit(Notice(text=text, level="warning"))
        self._track, why = progress.ended(self._track, iteration)
        if why is not None and self._asked_s is None:
            raise NoProgress(why)

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`: what it would have done is not done."""
        self._child, self._done = None, True
        self._host.emit(Notice(text=f"ft-clerk has ended ({status}): cycles are not told any more", level="warning"))
        self._host.recheck()

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`: a cycle is over, and another begins."""
        self._read(generation)

    def _read(self, generation: int) -> None:
        if self._settings.iteration_file and self._track.most > 0:
            self._send({"kind": "read", "path": self._settings.iteration_file, "generation": generation})

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        if self._settings.info_dir is not None:
            self._end("write")
            first = min(roster.members, key=lambda member: member.rank)
            if first.node == self._host.node:
                self._begin(roster, self._settings.log_file)
        return {}

    def _begin(self, roster: Roster, log: tuple[str, str] | None) -> None:
        self._asked_s, self._done = None, self._child is None
        nodes = dict.fromkeys(member.node for member in sorted(roster.members, key=lambda member: member.rank))
        waiting = [node for node in self._present if node not in nodes]
        self._open = {
            "job_id": self._job, "attempt_index": self._attempt, "cycle_number": roster.generation,
            "cycle_start_time": _now(self._clock), "cycle_end_time": "",
            "cycle_log_file": f"{log[0]}{roster.generation}{log[1]}" if log else "",
            "active_nodes": ",".join(self._present.get(node, node) for node in nodes),
            "standby_nodes": ",".join(self._present[node] for node in waiting),
            "active_ranks": ranks.brief(member.rank for member in roster.members), "generation": 0,
        }  # fmt: skip
        self._write("write")

    def _end(self, kind: str) -> None:
        if self._open is not None:
            self._open |= {"cycle_end_time": _now(self._clock), "generation": 1}
            self._write(kind)
            self._open = None

    def _write(self, kind: str) -> None:
        assert self._open is not None
        name = f"cycle_info.{self._job}.{self._attempt}.{self._open['cycle_number']}"
        place = {"folder": os.path.abspath(self._settings.info_dir or ""), "name": name, "link": self._link}
        self._send({"kind": kind, "is": self._open} | place)

    def _send(self, message: Message) -> None:
        if self._child is not None:
            self._child.send(message)

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""
        if self._asked_s is not None and not self._done and now >= self._asked_s + LAST_S:
            self._done = True
            self._host.recheck()

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`: the last file is waited for, a moment."""
        del completed
        if self._open is not None and self._child is not None:
            self._asked_s = self._clock.now()
            self._end("last")
            self._host.later(LAST_S)
        return self._done or self._asked_s is None

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()

    def close(self) -> None:
        """See `Companion.close`: the helper ends with its line."""
        self._child = None


def _now(clock: Clock) -> str:
    return datetime.fromtimestamp(clock.wall(), UTC).isoformat()
