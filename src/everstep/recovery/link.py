"""A local line between an agent and one of its processes: one JSON object a packet, descriptors beside it.

A SOCK_SEQPACKET pair: packets stay whole, the end of the other side is seen at once, nothing has a name on disk.
Sending is allowed from any thread; receiving belongs to one.
"""

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MAX_PACKET = 160 * 1024
MAX_FDS = 64


class LinkClosed(ConnectionError):
    """The other side is gone."""


class Link:
    """One end of a line."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple["Link", socket.socket]:
        """Return our end as a Link, and the other as a socket to be handed to a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET)
        return cls(ours), theirs

    @classmethod
    def from_fd(cls, fd: int) -> "Link":
        """Take over a descriptor that was inherited."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._end.fileno()

    def setblocking(self, flag: bool) -> None:
        """With False, a full line raises BlockingIOError in `send` and an empty one in `receive`."""
        self._end.setblocking(flag)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message. Raises LinkClosed when nobody is there, ValueError when it is larger than MAX_PACKET."""
        packet = json.dumps(message, separators=(",", ":")).encode()
        if len(packet) > MAX_PACKET:
            kind = message.get("kind")
            raise ValueError(
                f"message {kind!r} has {len(packet)} bytes, more than {MAX_PACKET}: pass a descriptor instead"
            )
        try:
            with self._lock:
                socket.send_fds(self._end, [packet], list(fds))
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for one message and its descriptors, which are the caller's to close. Raises LinkClosed at the end."""
        try:
            packet, fds, flags, _ = socket.recv_fds(self._end, MAX_PACKET + 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not packet:
            raise LinkClosed("the other side has closed")
        if flags & socket.MSG_TRUNC:
            raise ValueError(f"a packet of more than {MAX_PACKET} bytes arrived cut; it cannot be read")
        return json.loads(packet), fds

    def shutdown(self) -> None:
        """End the line for both sides; a thread inside `receive` returns with LinkClosed."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close our descriptor."""
        self._end.close()
