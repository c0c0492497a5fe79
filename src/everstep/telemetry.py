"""Where events go: a `Telemetry` stamps them and hands them to its sinks.

Any thread may emit. A sink that fails (a full disk) is tried again with the next event, and one line on stderr says so:
accounting never ends a training job, and a minute without space does not end the accounting. Nor does a console that
nobody reads any more.
"""

import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from everstep.clock import SYSTEM, Clock
from everstep.errors import LedgerError
from everstep.events import Event, Record, Stamp

FULL = (errno.ENOSPC, errno.EDQUOT)
SHOW_S = 1.0
_PIECE = 1024
"""Characters; with four bytes for each no more than a pipe that has room takes without waiting."""
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def more_room(error: OSError) -> str:
    """Return what mends a full disk or a used-up quota, as a sentence to go on from; nothing for another error."""
    return "Free some space there. " if error.errno in FULL else ""


def boot_id() -> str:
    """Return the first group of this boot's id: monotonic times compare only where it is equal."""
    try:
        return BOOT_ID_FILE.read_text().split("-")[0]
    except OSError:  # not Linux: reports are read there, never written
        return "00000000"


class Sink(Protocol):
    """Takes records one at a time, from any thread, without blocking for long."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...


class JsonLines:
    """Appends records to one file of this process; one `write(2)` a line, the newline first.

    A line torn by a kill or by a full disk is so ended by the next one, and spoils itself alone (EXPERIMENTS I6).
    The file is made by the first record that can be written, and made again when it has been removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._closed = False
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        """See `Sink.write`."""
        self.write_all((record,))

    def write_all(self, records: Iterable[Record]) -> None:
        """Take records that came together: each line begins with its newline, so a tear still spoils one alone."""
        lines = "".join(["\n" + record.to_json() for record in records]).encode()
        with self._lock:
            if self._fd < 0 or os.fstat(self._fd).st_nlink == 0:
                self._open()
            os.write(self._fd, lines)

    def _open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        self._let_go()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the file; later writes fail."""
        with self._lock:
            self._closed = True
            self._let_go()


@dataclass
class Telemetry:
    """Stamps events with time and place. `slot`, `rank` and `generation` are set by whoever knows them."""

    role: str
    sinks: list[Sink] = field(default_factory=list[Sink])
    clock: Clock = SYSTEM
    slot: int | None = None
    rank: int | None = None
    generation: int | None = None
    boot: str = field(default_factory=boot_id)
    _failing: dict[int, int] = field(default_factory=dict[int, int])  # events lost so far, by the sink's identity

    def emit(self, event: Event, *, at_s: float | None = None) -> Record:
        """Stamp `event` (at `at_s` monotonic seconds, else now), hand it to every sink, return the record."""
        return self.emit_all([(event, at_s)])[0]

    def emit_all(self, timed: Iterable[tuple[Event, float | None]]) -> list[Record]:
        """The same for events that are told together: one write for all of them."""
        now, wall, pid = self.clock.now(), self.clock.wall(), os.getpid()
        records: list[Record] = []
        for event, at_s in timed:
            then = now if at_s is None else at_s
            stamp = Stamp(
                mono_s=then, wall_s=wall - (now - then), boot_id=self.boot, pid=pid,
                role=self.role, slot=self.slot, rank=self.rank, generation=self.generation,
            )  # fmt: skip
            records.append(Record(stamp, event))
        for sink in tuple(self.sinks):
            try:
                _write(sink, records)
            except (OSError, ValueError) as error:
                self._failed(sink, error, len(records))
            else:
                if self._failing:
                    self._recovered(sink)
        return records

    def _failed(self, sink: Sink, error: Exception, count: int) -> None:
        lost = self._failing.get(id(sink), 0)
        self._failing[id(sink)] = lost + count
        if lost == 0:
            mend = f". {more_room(error)}" if isinstance(error, OSError) else ""
            say(f"{type(sink).__name__} cannot be written, events of this run are lost: {error}{mend}".rstrip(". "))

    def _recovered(self, sink: Sink) -> None:
        lost = self._failing.pop(id(sink), 0)
        if lost:
            say(f"{type(sink).__name__} can be written again; {lost} events were lost")


def _write(sink: Sink, records: Sequence[Record]) -> None:
    if isinstance(sink, JsonLines):
        sink.write_all(records)
    else:
        for record in records:
            sink.write(record)


def read_lines(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Read ledger files; return their records in order of time, and the lines that could not be read."""
    records: list[Record] = []
    unread: list[str] = []
    for path in paths:
        for line in path.read_text(errors="replace").splitlines():
            if not line.strip():
                continue
            try:
                records.append(Record.from_json(line))
            except LedgerError as error:
                unread.append(f"{path.name}: {error}")
    records.sort(key=lambda r: (r.stamp.wall_s, r.stamp.mono_s))
    return records, unread


def say(text: str) -> None:
    """Print one line for a person on stderr, where somebody still reads it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"everstep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the door for words to people


def show(text: str, limit_s: float = SHOW_S) -> None:
    """Print `text` on stderr, for at most `limit_s` while nobody makes room: the rest is lost, the caller goes on."""
    stream = sys.stderr
    if stream is None:
        return
    until = SYSTEM.now() + limit_s
    with contextlib.suppress(Exception):  # the script may have put anything in its place
        for at in range(0, len(text), _PIECE):
            if not _has_room(stream, max(0.0, until - SYSTEM.now())):
                return
            stream.write(text[at : at + _PIECE])
            stream.flush()


def _has_room(stream: TextIO, limit_s: float) -> bool:
    """Tell whether a piece can be written without waiting; a stream without a descriptor says nothing about it."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(limit_s * 1000))


def leave_streams() -> None:
    """Flush what a command has printed; a reader that has gone is no error, and changes no exit code (LA-23)."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or there never was one
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, fd)  # what the interpreter flushes at its end goes there
                os.close(null)
