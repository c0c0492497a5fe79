"""Reads the ledger of a run folder: `events/*.jsonl`, one file per process; of other nodes `node-N/events/*.jsonl`.

Two nodes may give one number to two processes (containers do), so those of another node are told apart by a number
of their own: N * 2**32 + pid, in all that its records say of processes, and in rosters for the ranks that stand there.

A last line that was torn by a kill is ignored; any other line that cannot be read is counted and shown. A line that
stands twice (a file copied over, two collectors) counts once.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from everstep.errors import LedgerError, UsageError
from everstep.events import GenerationStarted, ProcessEnded, ProcessStarted, Record
from everstep.goodput.core.story import PIDS

RUNS = Path("everstep-runs")
ANOTHER_NODE = re.compile(r"node-(\d+)")


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
    _read_other_nodes(log)
    if not log.records:
        raise LedgerError(
            f"{folder}: none of the {len(log.unread) + log.torn} lines in {len(files)} files of events/ is an event "
            f"that this version reads{_first(log.unread)}. The run was killed before its first record, or the folder "
            "was written by something else."
        )
    return log


def _read_other_nodes(log: Log) -> None:
    """The first node's folder may hold those of the others."""
    found = [(ANOTHER_NODE.fullmatch(folder.name), folder) for folder in sorted(log.folder.glob("node-*"))]
    nodes = {match[0]: (int(match[1]), folder) for match, folder in found if match and _holds_events(folder)}
    if not nodes:
        return
    numbers = {name: number for name, (number, _) in nodes.items()}
    log.records = [_of_node(record, 0, numbers) for record in log.records]
    for number, folder in nodes.values():
        part = Log(folder)
        seen: set[str] = set()
        for path in sorted((folder / "events").glob("*.jsonl")):
            _read_file(path, part, seen)
            log.files += 1
        log.records += [_of_node(record, number, numbers) for record in part.records]
        log.torn += part.torn
        log.unread += [f"{folder.name}/{text}" for text in part.unread]


def _of_node(record: Record, number: int, numbers: Mapping[str, int]) -> Record:
    """Return a record of a node with pids that no other node's process has."""
    event, stamp = record.event, record.stamp
    if isinstance(event, GenerationStarted) and event.nodes:
        members = tuple(
            (rank, slot, numbers.get(node, 0) * PIDS + pid, why)
            for (rank, slot, pid, why), node in zip(event.members, event.nodes, strict=True)
        )
        event = replace(event, members=members)
    elif isinstance(event, ProcessStarted | ProcessEnded):
        event = replace(event, child_pid=number * PIDS + event.child_pid)
    return replace(record, stamp=replace(stamp, pid=number * PIDS + stamp.pid), event=event)


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
