"""`--tee`: what workers write into their log files is shown on the console too, with torchrun's prefix.

Rule 1: the worker writes to a file and never waits for a reader; we read behind it, a bounded amount a round.
Rule 2: nor do we wait: nothing is written unless the console takes it. What it does not take stays in the file, and is
        read when there is room again; memory does not grow with what is shown.
Rule 3: a closed console ends the showing, not the job (LA-23). A line without an end (a progress bar) is cut.
"""

import os
import select
from dataclasses import dataclass, field

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
class Tail:
    """One file that is followed."""

    path: str
    prefix: str
    console: Console
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


def tails_of(role: str, rank: int, stdout: str, stderr: str) -> list[Tail]:
    """Follow the streams whose paths are given."""
    prefix = f"[{role}{rank}]:"
    return [Tail(path, prefix, _consoles[fd]) for path, fd in ((stdout, 1), (stderr, 2)) if path]
