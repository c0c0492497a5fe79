"""A local line between an agent and one of its processes: one JSON object a packet, descriptors beside it.

A SOCK_SEQPACKET pair: packets stay whole, the end of the other side is seen at once, nothing has a name on disk.
Sending is allowed from any thread; receiving belongs to one. A message that no packet holds (an environment of 100 KB
and more) goes as a descriptor of its text, without its two sides knowing.
"""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MAX_PACKET = 160 * 1024
MAX_MESSAGE = 64 * 1024 * 1024
MAX_FDS = 64
_ELSEWHERE = b"@"
"""A packet that begins with it, and no JSON does, says that its first descriptor holds the message."""


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

    def patience(self, seconds: int) -> None:
        """Let `receive` raise BlockingIOError where nothing has come for so long; 0: it waits for ever."""
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message. Raises LinkClosed when nobody is there, ValueError when it is larger than MAX_MESSAGE."""
        packet = json.dumps(message, separators=(",", ":")).encode()
        if len(packet) <= MAX_PACKET:
            self._send(packet, fds)
            return
        if len(packet) > MAX_MESSAGE:
            kind = message.get("kind")
            raise ValueError(
                f"message {kind!r} has {len(packet)} bytes, more than {MAX_MESSAGE}: pass a descriptor instead"
            )
        fd = os.memfd_create("everstep-message", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(packet)
            self._send(_ELSEWHERE, [fd, *fds])
        finally:
            os.close(fd)

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        try:
            with self._lock:
                socket.send_fds(self._end, [packet], list(fds))
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for one message and its descriptors, which are the caller's to close.

        Raises LinkClosed at the end, and ValueError for what is not a message of ours; its descriptors are closed.
        """
        try:
            packet, fds, flags = self._receive()
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not packet:
            raise LinkClosed("the other side has closed")
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError(f"a packet of more than {MAX_PACKET} bytes arrived cut; it cannot be read")
            return _message(_fetched(fds.pop(0)) if packet == _ELSEWHERE and fds else packet), fds
        except ValueError:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            raise

    def _receive(self) -> tuple[bytes, list[int], int]:
        """Return the next packet, empty at the end, its descriptors and flags.

        Where the other side has closed with something of ours unread, the kernel says so once (ECONNRESET) before it
        hands over what the other side had still said: its last words are not lost.
        """
        try:
            return socket.recv_fds(self._end, MAX_PACKET + 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)[:3]
        except ConnectionResetError:
            return socket.recv_fds(self._end, MAX_PACKET + 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)[:3]

    def shutdown(self) -> None:
        """End the line for both sides; a thread inside `receive` returns with LinkClosed."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close our descriptor."""
        self._end.close()


def _fetched(fd: int) -> bytes:
    """Return what was too large for a packet, and close its descriptor."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read(MAX_MESSAGE)


def _message(packet: bytes) -> dict[str, Any]:
    found = json.loads(packet)
    if not isinstance(found, dict):
        raise ValueError("a packet that is no JSON object arrived")
    return found
