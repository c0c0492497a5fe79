"""Reads the ledger of a run folder: `events/*.jsonl`, one file per process.

A last line that was torn by a kill is ignored; any other line that cannot be read is counted and shown. A line that
stands twice (a file copied over, two collectors) counts once.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.errors import LedgerError, UsageError
from everstep.events import Record

RUNS = Path("everstep-runs")


@dataclass(slots=True)
class Log:
    """What a run folder holds."""

    folder: Path
    records: list[Record] = field(default_factory=list[Record])
    files: int = 0
    torn: int = 0
    unread: list[str] = field(default_factory=list[str])


def newest_run(top: Path = RUNS) -> Path:
    """Return the newest run folder below `top` that holds an event; UsageError where there is none."""
    found = [folder for folder in top.glob("*") if _holds_events(folder)] if top.is_dir() else []
    if not found:
        raise UsageError(f"no RUN was given and {top}/ holds no run folder; name one: `everstep report RUN_DIR`")
    return max(found, key=lambda folder: ((folder / "events").stat().st_mtime_ns, folder.name))


def _holds_events(folder: Path) -> bool:
    return any(file.stat().st_size for file in (folder / "events").glob("*.jsonl"))


def read_run(folder: Path) -> Log:
    """Read all records of a run folder. Raises UsageError for what is no run folder, LedgerError for an empty one."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; expected a run folder as `everstep run` prints it first")
    try:
        names = os.listdir(folder / "events") if (folder / "events").is_dir() else []
    except OSError as error:
        raise UsageError(
            f"{folder}/events cannot be listed: {error.strerror}; read it as the user who ran it"
        ) from None
    files = sorted(folder / "events" / name for name in names if name.endswith(".jsonl"))
    if not files:
        raise UsageError(
            f"{folder} is no run folder: it holds no events/*.jsonl. Expected one made by `everstep run`; "
            "its path is the first line that the run prints."
        )
    log = Log(folder, files=len(files))
    seen: set[str] = set()
    for path in files:
        _read_file(path, log, seen)
    if not log.records:
        raise LedgerError(
            f"{folder}: none of the {len(log.unread) + log.torn} lines in {len(files)} files of events/ is an event "
            f"that this version reads{_first(log.unread)}. The run was killed before its first record, or the folder "
            "was written by something else."
        )
    return log


def _read_file(path: Path, log: Log, seen: set[str]) -> None:
    lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
    for position, line in enumerate(lines):
        if line in seen:
            continue
        seen.add(line)
        try:
            log.records.append(_timed(Record.from_json(line)))
        except LedgerError as error:
            if position == len(lines) - 1:
                log.torn += 1
            else:
                log.unread.append(f"{path.name}, line {position + 1}: {error}")


def _timed(record: Record) -> Record:
    """Return the record if its times are numbers: a flipped bit must not move a whole boot."""
    stamp = record.stamp
    if _is_finite(stamp.mono_s) and _is_finite(stamp.wall_s):
        return record
    times = f"{stamp.mono_s!r}, {stamp.wall_s!r}"
    raise LedgerError(f"a record of {type(record.event).__name__} whose times are no numbers: {times}")


def _is_finite(value: object) -> bool:
    """Judge what JSON held, whatever Stamp declares."""
    return isinstance(value, int | float) and math.isfinite(value)


def _first(unread: Sequence[str]) -> str:
    return f" (the first: {unread[0]})" if unread else ""
