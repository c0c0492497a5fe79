"""`--ft-nvrx-logfile`: what the agent does, a line an event, beside the ledger of the run folder."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from everstep.events import Notice, Record


class LogFile:
    """A sink of the agent's telemetry. A file that takes nothing is told by the telemetry, and ends nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, record: Record) -> None:
        """See `Sink.write`: opened for each line, so that it may be moved away. Raises OSError."""
        when = datetime.fromtimestamp(record.stamp.wall_s, UTC).isoformat(timespec="milliseconds")
        event = record.event
        if isinstance(event, Notice):
            told = f"{event.level.upper()} {event.text}"
        else:
            told = " ".join([type(event).__name__, *(f"{name}={value!r}" for name, value in asdict(event).items())])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{when} {told}".replace("\n", "\n    ") + "\n")
