"""The ranks of one host as their keeper has them: they come over a local socket, and the kernel tells when they end."""

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, Protocol

from everstep.process.loop import Loop
from everstep.recovery.line import Line
from everstep.recovery.link import Link

_PEER = struct.Struct("3i")


class Keeping(Protocol):
    """The keeper whose ranks they are."""

    def begin(self, settings: Mapping[str, Any]) -> None:
        """The rank that has started it says what it is to keep."""
        ...

    def hello(self, rank: int, pid: int, line: Line) -> bool:
        """A rank comes; False where it is not wanted."""
        ...

    def said(self, rank: int, message: dict[str, Any]) -> None:
        """A rank says something."""
        ...

    def went(self, rank: int, why: str) -> None:
        """A rank has ended, or hung up; once or twice."""
        ...

    def deserted(self) -> None:
        """Who has started it is gone, and never was a rank."""
        ...


class Ranks:
    """Their lines, from `first`, that of the rank that has started the keeper; others come through `door`."""

    def __init__(self, loop: Loop, first: Link, door: socket.socket | None, keeper: Keeping) -> None:
        self._loop, self._door, self._keeper = loop, door, keeper
        self._unnamed: list[Line] = []
        self._pidfds: dict[int, int] = {}
        self.lines: dict[int, Line] = {}
        self.over = False  # they are being closed
        self._first = self._enter(first)
        if door is not None:
            loop.watch(door.fileno(), self._accept)

    def shut(self) -> None:
        """All have come: nobody else is let in."""
        if self._door is not None:
            self._loop.unwatch(self._door.fileno())
            self._door.close()
            self._door = None

    def _accept(self) -> None:
        assert self._door is not None
        end, _ = self._door.accept()
        _, uid, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.getuid():
            end.close()
            return
        self._enter(Link(end))

    def _enter(self, link: Link) -> Line:
        line: list[Line] = []

        def heard(message: dict[str, Any], fds: list[int]) -> None:
            for fd in fds:
                os.close(fd)
            self._heard(line[0], message)

        def ended() -> None:
            self._ended(line[0])

        line.append(Line(self._loop, link, heard, ended))
        self._unnamed.append(line[0])
        return line[0]

    def _of(self, line: Line) -> int | None:
        return next((rank for rank, one in self.lines.items() if one is line), None)

    def _heard(self, line: Line, message: dict[str, Any]) -> None:
        rank, kind = self._of(line), message["kind"]
        if rank is not None:
            self._keeper.said(rank, message)
        elif kind == "ckpt.begin":
            self._keeper.begin(message)
        elif kind == "ckpt.hello":
            self._hello(line, int(message["rank"]), int(message["pid"]))

    def _hello(self, line: Line, rank: int, pid: int) -> None:
        if rank in self.lines or not self._keeper.hello(rank, pid, line):
            line.close()
            return
        self._unnamed.remove(line)
        self.lines[rank] = line
        with contextlib.suppress(ProcessLookupError):
            self._pidfds[rank] = os.pidfd_open(pid)
            self._loop.watch(self._pidfds[rank], lambda: self._lost(rank, pid))

    def _ended(self, line: Line) -> None:
        """The other side of a line has hung up."""
        if self.over:
            return
        rank = self._of(line)
        line.close()
        if rank is not None:
            self._keeper.went(rank, "has ended")
        elif line in self._unnamed:
            self._unnamed.remove(line)
            if line is self._first:
                self._keeper.deserted()

    def _lost(self, rank: int, pid: int) -> None:
        """The kernel says that a rank's process has ended."""
        self._loop.unwatch(self._pidfds[rank])
        self.lines[rank].close()  # what it still said comes first
        self._keeper.went(rank, f"(process {pid}) has ended")
