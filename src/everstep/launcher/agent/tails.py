"""`--tee`: what workers write into their log files is shown on the console too, with torchrun's prefix.

The worker writes to a file and never waits for a reader; we read behind it, a bounded amount a round.
"""

import os
import sys
from dataclasses import dataclass
from typing import BinaryIO

_MOST_A_ROUND = 1 << 20


@dataclass
class Tail:
    """One file that is followed."""

    path: str
    prefix: str
    target: BinaryIO
    fd: int = -1
    rest: bytes = b""

    def pump(self, *, last: bool = False) -> None:
        """Show what has been written since; with `last`, all of it, and a line without its end too."""
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDONLY)
            except OSError:
                return
        while True:
            data = os.read(self.fd, _MOST_A_ROUND)
            *lines, self.rest = (self.rest + data).split(b"\n")
            if last and not data and self.rest:
                lines, self.rest = [*lines, self.rest], b""
            self._show(lines)
            if not data or not last:
                return

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            self.target.write(b"".join(self.prefix.encode() + line + b"\n" for line in lines))
            self.target.flush()
        except (OSError, ValueError):  # `| head -1` has closed the console: training goes on (LA-23)
            self.target = open(os.devnull, "wb")  # noqa: SIM115 - lives as long as this tail

    def close(self) -> None:
        """Show the last of it and let the file go."""
        self.pump(last=True)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tails_of(role: str, rank: int, stdout: str, stderr: str) -> list[Tail]:
    """Follow the streams whose paths are given."""
    prefix = f"[{role}{rank}]:"
    pairs = ((stdout, sys.stdout.buffer), (stderr, sys.stderr.buffer))
    return [Tail(path, prefix, target) for path, target in pairs if path]
