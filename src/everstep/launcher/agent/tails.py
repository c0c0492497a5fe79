"""`--tee`: what workers write into their log files is shown on the console too, with torchrun's prefix, and what
`--duplicate-stdout-filters` and its like name is gathered in one file an attempt.

Rule 1: the worker writes to a file and never waits for a reader; we read behind it, a bounded amount a round.
Rule 2: nor do we wait: nothing is written unless the console takes it. What it does not take stays in the file, and is
        read when there is room again; memory does not grow with what is shown.
Rule 3: what a process that has ended wrote last is shown as its turn comes, after its end too: for the last lines
        before a crash one reads a console (W35). When the job is over they are waited for while somebody reads.
Rule 4: a closed console ends the showing, not the job (LA-23). A line without an end (a progress bar) is cut.
"""

import contextlib
import os
import select
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from string import Template

_MOST_A_ROUND = 1 << 16
_LONGEST_LINE = 1 << 14
_PIECE = 512  # what POLLOUT promises room for
MOST_ENDED = 64  # files of ended processes that are kept open for a console that is slow
QUIET_S, REST_S = (
    1.0,
    10.0,
)  # at the job's end: a console that takes nothing for so long is not waited for; nor any for longer


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

    def takes(self, limit_s: float) -> bool:
        """Wait until it takes something, or is closed; False where it has not for so long."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return not self.open or bool(poll.poll(limit_s * 1000))


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

    def takes(self, limit_s: float) -> bool:
        """At once."""
        del limit_s
        return True


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

    def finish(self) -> bool:
        """Nothing more is written: show the rest, a line without its end too; True when all of it was shown."""
        if not self.pump():
            return False
        if self.rest:
            self._show([self.rest])
            self.rest = b""
        if not self.console.clear():
            return False
        self.close()
        return True

    def close(self) -> None:
        """Let the file go, whatever was shown."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Shown:
    """The files that are followed for one node."""

    def __init__(self) -> None:
        self._living: list[Tail] = []
        self._ended: list[Tail] = []  # the oldest first

    def follow(self, tails: Iterable[Tail]) -> None:
        """Follow these too."""
        self._living += tails

    def ended(self, paths: Container[str]) -> None:
        """Who wrote these files has ended."""
        self._ended += [tail for tail in self._living if tail.path in paths]
        self._living = [tail for tail in self._living if tail.path not in paths]
        self.pump()
        for tail in self._ended[: max(0, len(self._ended) - MOST_ENDED)]:
            tail.close()
            self._ended.remove(tail)

    def pump(self) -> None:
        """Show what has been written, as far as it is taken."""
        self._ended = [tail for tail in self._ended if not tail.finish()]
        for tail in self._living:
            tail.pump()

    def settle(self, now: Callable[[], float]) -> None:
        """The job is over: show the rest while somebody reads, and let all files go. `now`: monotonic seconds."""
        until = now() + REST_S
        self._ended, self._living = self._ended + self._living, []
        self.pump()
        while self._ended and now() < until and any(tail.console.takes(QUIET_S) for tail in self._ended):
            self.pump()
        for tail in self._ended:
            tail.close()


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
