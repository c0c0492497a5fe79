"""The line between the keepers of two hosts: TCP, one message a frame, bytes beside it, sent without ever blocking.

    leading keeper ─▶ nonce {nonce}                                       whoever connects is nobody yet
    other keeper   ─▶ greet {host, nonce, proof}                          it has the token, and so is one of ours
    leading keeper ─▶ welcome {proof}                                     we have it too
    both           ─▶ beat                                                every BEAT_S

Rule 1: the token is never sent; each proves that it has it by a digest over both nonces. Nothing is encrypted: who can
read and change what the hosts say to one another can do so to the training as well.
Rule 2: until it has proved itself a peer may send a few KiB, and has GREET_S.
Rule 3: nothing is dropped in silence: a peer that does not take what it is sent, or says nothing for LOST_S, is lost.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.core.hosts import BEAT_S, LOST_S, Silence
from everstep.process.loop import Loop

GREET_S = 5.0
MOST_UNSENT = 256 << 20
MOST_MESSAGE = 64 << 20
MOST_CONTENT = 1 << 30
STRANGER = 4096
"""Bytes of a frame from somebody who has not proved anything."""
LINGER_S = 2.0
_FRAME = struct.Struct("!II")
_PIECE = 1 << 20
Message = Mapping[str, Any]
Heard = Callable[[Message, bytes], None]
"""Called with a message and the bytes beside it."""


class HostLine:
    """One end, watched by the loop. `on_end` is called once with the reason, unless we close it ourselves.

    A stranger's, until `trust` is called. Messages without a `kind`, and frames that nobody of ours sends, end it.
    """

    def __init__(self, loop: Loop, end: socket.socket, on_message: Heard, on_end: Callable[[str], None]) -> None:
        self._loop, self._end = loop, end
        self.on_message, self.on_end = on_message, on_end
        self._read, self._unsent = bytearray(), bytearray()
        self._most = (STRANGER, 0)
        self.open = True
        now = loop.clock.now()
        self._silence = Silence(now, now)
        end.setblocking(False)
        with contextlib.suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(end.fileno(), self._receive)

    def trust(self) -> None:
        """The other side has proved who it is: from here on it is asked to show that it lives, and so do we."""
        self._most = (MOST_MESSAGE, MOST_CONTENT)
        now = self._loop.clock.now()
        self._silence = Silence(now, now)
        self._beat()

    def send(self, message: Message, content: bytes = b"") -> None:
        """Send now or when there is room; to one that is gone: nothing."""
        if not self.open:
            return
        text = json.dumps(message, separators=(",", ":")).encode()
        self._unsent += _FRAME.pack(len(text), len(content)) + text + content
        if len(self._unsent) > MOST_UNSENT:
            self._lost("it takes nothing of what it is sent")
            return
        self._flush()

    def close(self) -> None:
        """Send what was said, for LINGER_S at most, and let go."""
        if not self.open:
            return
        self.open = False
        self._loop.unwatch(self._end.fileno())
        with contextlib.suppress(OSError):
            self._end.settimeout(LINGER_S)
            self._end.sendall(self._unsent)
            self._end.shutdown(socket.SHUT_WR)
            while self._end.recv(_PIECE):  # what is unread when a socket is closed takes along what was sent
                continue
        self._end.close()

    def drop(self) -> None:
        """Let go at once, whatever was said."""
        if self.open:
            self.open = False
            self._loop.unwatch(self._end.fileno())
            self._end.close()

    def _beat(self) -> None:
        if not self.open:
            return
        self._silence, lost = self._silence.look(self._loop.clock.now())
        if lost:
            self._lost(f"it has said nothing for {LOST_S:.0f} s")
            return
        self.send({"kind": "beat"})
        self._loop.later(BEAT_S, self._beat)

    def _flush(self) -> None:
        try:
            while self._unsent:
                with memoryview(self._unsent) as view:
                    sent = self._end.send(view[:_PIECE])
                del self._unsent[:sent]
        except BlockingIOError:
            self._loop.watch(self._end.fileno(), self._flush, write=True)
            return
        except OSError as error:
            self._lost(error.strerror or str(error))
            return
        self._loop.unwatch(self._end.fileno(), write=True)

    def _receive(self) -> None:
        while self.open:
            try:
                piece = self._end.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(error.strerror or str(error))
                return
            if not piece:
                self._lost("it has ended")
                return
            self._silence = self._silence.heard(self._loop.clock.now())
            self._read += piece
            if not self._take():
                self._lost("it said what nobody understands")

    def _take(self) -> bool:
        """Hand out what is whole; False for what is none of ours."""
        while self.open and len(self._read) >= _FRAME.size:
            size, beside = _FRAME.unpack_from(self._read)
            if size > self._most[0] or beside > self._most[1]:
                return False
            whole = _FRAME.size + size + beside
            if len(self._read) < whole:
                return True
            with memoryview(self._read) as view:
                text, content = bytes(view[_FRAME.size : _FRAME.size + size]), bytes(view[_FRAME.size + size : whole])
            del self._read[:whole]
            if not self._hand_out(text, content):
                return False
        return True

    def _hand_out(self, text: bytes, content: bytes) -> bool:
        try:
            message: Any = json.loads(text)
            kind = str(message["kind"])
        except (ValueError, TypeError, LookupError, RecursionError):
            return False
        if kind != "beat":
            self.on_message(message, content)
        return True

    def _lost(self, why: str) -> None:
        if self.open:
            self.drop()
            self.on_end(why)


def proof(token: str, who: str, host: int, nonces: tuple[str, str]) -> str:
    """Return what shows that `who` ("leader" or "keeper") of a host has the token."""
    return hmac.new(token.encode(), json.dumps([who, host, *nonces]).encode(), hashlib.sha256).hexdigest()


class Greeting:
    """The leading side, of one that has connected: `known(host, line)` when it has proved itself, else dropped."""

    def __init__(self, loop: Loop, end: socket.socket, token: str, known: Callable[[int, HostLine], None]) -> None:
        self._token, self._known = token, known
        self._nonce = secrets.token_hex(16)
        self.line = HostLine(loop, end, self._heard, lambda why: None)
        self.done = False
        self.line.send({"kind": "nonce", "nonce": self._nonce})
        loop.later(GREET_S, self._too_late)

    def _heard(self, message: Message, content: bytes) -> None:
        del content
        try:
            host, nonces = int(message["host"]), (self._nonce, str(message["nonce"]))
            fits = hmac.compare_digest(proof(self._token, "keeper", host, nonces), str(message["proof"]))
        except (LookupError, TypeError, ValueError, OverflowError):
            fits, host, nonces = False, -1, ("", "")
        if self.done or not fits or message["kind"] != "greet":
            self.line.drop()
            return
        self.done = True
        self.line.send({"kind": "welcome", "proof": proof(self._token, "leader", host, nonces)})
        self.line.trust()
        self._known(host, self.line)

    def _too_late(self) -> None:
        if not self.done:
            self.line.drop()


class Arrival:
    """The other side, of a connection: `known(line)` when the leader has proved itself, else `failed(why)`."""

    def __init__(
        self,
        loop: Loop,
        end: socket.socket,
        token: str,
        host: int,
        known: Callable[[HostLine], None],
        failed: Callable[[str], None],
    ) -> None:
        self._token, self._host, self._known, self._failed = token, host, known, failed
        self._nonces = ("", "")
        self.line = HostLine(loop, end, self._heard, self._over)
        self.done = False
        loop.later(GREET_S, self._too_late)

    def _heard(self, message: Message, content: bytes) -> None:
        del content
        if message["kind"] == "nonce":
            self._nonces = str(message.get("nonce")), secrets.token_hex(16)
            told = proof(self._token, "keeper", self._host, self._nonces)
            self.line.send({"kind": "greet", "host": self._host, "nonce": self._nonces[1], "proof": told})
        elif message["kind"] == "welcome" and hmac.compare_digest(
            str(message.get("proof")), proof(self._token, "leader", self._host, self._nonces)
        ):
            self.done = True
            self.line.trust()
            self._known(self.line)
        else:
            self.line.drop()
            self._over("who listens there is not the keeper of this world")

    def _over(self, why: str) -> None:
        if not self.done:
            self.done = True
            self._failed(why)

    def _too_late(self) -> None:
        if not self.done:
            self.line.drop()
            self._over("who listens there says nothing")
