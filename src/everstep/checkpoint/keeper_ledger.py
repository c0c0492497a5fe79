"""What a keeper tells of its saves: events in the run folder of an agent, or of EVERSTEP_RUN_DIR where it is alone.

A run folder in which nobody else has said that a run began is the keeper's own: `everstep report` then tells what the
Checkpointer did, and of the loop nothing. Without a folder nothing is told.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.clock import Clock
from everstep.events import Event, RunEnded, RunStarted, TierEvent
from everstep.telemetry import JsonLines, Telemetry

MEMORY = "memory"
REMEMBERED = 16
"""Numbers of which not every rank has told yet."""


class KeeperLedger:
    """Of one keeper; `settings` are those that it was begun with."""

    def __init__(self, settings: Mapping[str, Any], clock: Clock) -> None:
        told: Mapping[str, Any] = settings.get("ledger") or {}
        folder = str(told.get("run_dir") or "")
        self._world_size, self._own = int(settings["world_size"]), bool(told.get("own"))
        self._file = JsonLines(Path(folder) / "events" / f"keeper-{os.getpid()}.jsonl") if folder else None
        self._telemetry = Telemetry("keeper", sinks=[self._file] if self._file else [], clock=clock)
        self._snapshots: dict[int, dict[int, Mapping[str, Any]]] = {}  # number → rank → what it took
        if self._own:
            job, argv = f"checkpointer-{settings['pid']}", tuple(map(str, told.get("argv", ())))
            self.emit(RunStarted(job=job, argv=argv, world_size=self._world_size, spares=0, wrapped=False))

    def emit(self, event: Event) -> None:
        """Append an event."""
        if self._file is not None:
            self._telemetry.emit(event)

    def taken(self, rank: int, message: Mapping[str, Any]) -> None:
        """A rank has copied a state to memory; told when every rank has."""
        number = int(message["number"])
        ranks = self._snapshots.setdefault(number, {})
        ranks[rank] = message
        if len(ranks) == self._world_size:
            del self._snapshots[number]
            size = sum(int(one.get("bytes", 0)) for one in ranks.values())
            slowest = max(float(one.get("seconds", 0.0)) for one in ranks.values())
            self.emit(TierEvent(tier=MEMORY, what="taken", step=int(message["step"]), bytes=size, seconds=slowest))
        for old in sorted(self._snapshots)[:-REMEMBERED]:
            del self._snapshots[old]

    def close(self, problems: Sequence[str]) -> None:
        """The keeper ends."""
        if self._own:
            self.emit(RunEnded(code=int(bool(problems)), reason="; ".join(problems) or "the Checkpointer was closed"))
        if self._file is not None:
            self._file.close()
