"""A TCP connection between a watcher and its hub: one JSON object a line, sent without ever blocking."""

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from everstep.process.loop import Loop

MOST_UNREAD = 16 * 1024 * 1024
"""Bytes of one line, and bytes that wait for a peer that does not read; beyond them the connection ends."""


class Stream:
    """One end, watched by the loop. `on_end` is called once, unless we close it ourselves."""

    def __init__(
        self,
        loop: Loop,
        line: socket.socket,
        on_message: Callable[[Mapping[str, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop, self._line = loop, line
        self._on_message, self._on_end = on_message, on_end
        self._read, self._unsent = b"", b""
        self._open = True
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(line.fileno(), self._receive)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send now or when there is room."""
        if self._open:
            self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._line.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > MOST_UNREAD:
                self._end()
            else:
                self._loop.watch(self._line.fileno(), self._flush, write=True)
            return
        except OSError:
            self._end()
            return
        self._loop.unwatch(self._line.fileno(), write=True)

    def _receive(self) -> None:
        while self._open:
            try:
                piece = self._line.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece or not self._take(piece):
                self._end()

    def _take(self, piece: bytes) -> bool:
        """Hand out what is whole; False for what is no line of ours (a TCPStore's client begins with a zero)."""
        *whole, self._read = (self._read + piece).split(b"\n")
        for text in whole:
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):  # or nested beyond what can be read
                return False
            if not isinstance(message, dict):
                return False
            if self._open:
                self._on_message(message)
        return self._read[:1] in (b"", b"{") and len(self._read) <= MOST_UNREAD

    def _end(self) -> None:
        if self._open:
            self.close()
            self._on_end()

    def close(self) -> None:
        """Send what still can be sent, and let go."""
        if self._open:
            self._open = False
            self._loop.unwatch(self._line.fileno())
            with contextlib.suppress(OSError):
                if self._unsent:
                    self._line.send(self._unsent)
            self._line.close()
