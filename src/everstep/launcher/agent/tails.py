"""`--tee`: what workers write into their log files is shown on the console too, with torchrun's prefix, and what
`--duplicate-stdout-filters` and its like name is gathered in one file an attempt.

Rule 1: the worker writes to a file and never waits for a reader; we read behind it, a bounded amount a round.
Rule 2: nor do we wait: nothing is written unless the console takes it. What it does not take stays in the file, and is
        read when there is room again; memory does not grow with what is shown.
Rule 3: a closed console ends the showing, not the job (LA-23). A line without an end (a progress bar) is cut.
"""

import contextlib
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import Template

_MOST_A_ROUND = 1 << 16
_LONGEST_LINE = 1 << 14
_PIECE = 512  # what POLLOUT promises room for


@dataclass(eq=False)
class Console:
    """One of our own streams, written only as fast as it takes bytes."""

    fd: int
    open: bool = True
    _waiting: bytearray = field(default_factory=bytearray)

    def clear(self) -> bool:
        """Write what waits, as far as it is taken; True when nothing waits any more."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        try:
            while self.open and self._waiting:
                ready = poll.poll(0)
                if not ready:
                    return False
                if not ready[0][1] & select.POLLOUT:
                    break
                del self._waiting[: os.write(self.fd, self._waiting[:_PIECE])]
            if not self._waiting:
                return True
        except BlockingIOError:
            return False
        except OSError:
            pass
        self.open = False
        self._waiting.clear()
        return True

    def put(self, data: bytes) -> None:
        """Show `data` before anything else is shown."""
        if self.open:
            self._waiting += data


@dataclass(eq=False)
class Gathered:
    """A file that lines of several ranks are gathered in: appended to, so that no other attempt's are lost."""

    path: str

    def clear(self) -> bool:
        """Nothing waits, ever."""
        return True

    def put(self, data: bytes) -> None:
        """Append whole lines; a full disk loses them, and ends nothing."""
        if data:
            with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as file:
                file.write(data)


@dataclass(eq=False)
class Tail:
    """One file that is followed."""

    path: str
    prefix: str
    console: Console | Gathered
    needles: tuple[bytes, ...] = ()  # only lines with one of them; all lines where there is none
    fd: int = -1
    rest: bytes = b""

    def pump(self) -> bool:
        """Show what has been written since, as far as the console takes it; True when that was all there is."""
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return True
        while self.console.clear():
            data = os.read(self.fd, _MOST_A_ROUND)
            *lines, self.rest = (self.rest + data).split(b"\n")
            while len(self.rest) > _LONGEST_LINE:
                lines, self.rest = [*lines, self.rest[:_LONGEST_LINE]], self.rest[_LONGEST_LINE:]
            self._show(lines)
            if not data:
                return True
        return False

    def _show(self, lines: list[bytes]) -> None:
        if self.needles:
            lines = [line for line in lines if any(needle in line for needle in self.needles)]
        self.console.put(b"".join(self.prefix.encode() + line + b"\n" for line in lines))

    def close(self) -> None:
        """Show the last of it, a line without its end too, as far as the console takes it; let the file go."""
        if self.pump() and self.rest:
            self._show([self.rest])
        self.console.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_consoles = {fd: Console(fd) for fd in (1, 2)}


@dataclass(frozen=True, slots=True)
class Streams:
    """What is shown of one worker: the files of its streams, empty where one is not, and what to gather of each."""

    files: tuple[str, str]  # stdout, stderr
    filters: tuple[Sequence[str], Sequence[str]] = ((), ())


def tails_of(prefix: str, streams: Streams) -> list[Tail]:
    """Follow the streams whose files are given."""
    found: list[Tail] = []
    for path, wanted, fd, name in zip(streams.files, streams.filters, (1, 2), ("stdout", "stderr"), strict=True):
        if not path:
            continue
        found.append(Tail(path, prefix, _consoles[fd]))
        if wanted:
            attempt = os.path.dirname(os.path.dirname(path))
            needles = tuple(text.encode() for text in wanted)
            found.append(Tail(path, prefix, Gathered(os.path.join(attempt, f"filtered_{name}.log")), needles))
    return found


def gathered_in(path: str, prefix: str, files: Sequence[str]) -> list[Tail]:
    """Follow all of these files, and gather every line in one other."""
    return [Tail(file, prefix, Gathered(path)) for file in files if file and file != os.devnull]


def prefix_of(template: str | None, role: str, rank: int, local_rank: int) -> str:
    """Return what stands before each line: torchrun's `[role0]:`, or its TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
