"""The porter: one process of each node that sends snapshots to other nodes, and receives theirs.

It is forked from the zygote, reads and writes what its agent holds, by descriptor, and speaks TCP to other porters. The
agent never touches a byte; what has been received outlives us.

    expect {transfer, ticket} + memory       → expecting {transfer}, begun {transfer},
                                               received {transfer, bytes, seconds} | refused {transfer, text}
    forget {transfer}                        (nobody shall come any more; one who has come is cut off)
    send {transfer, ticket, host, port, rank, step, epoch, generation} + snapshot
                                             → sent {transfer, bytes, seconds} | refused {transfer, text}
                                             ← door {port}: at the start

 sender                                                                            receiver
    hash (where nobody has: the copy is hashed from here on), connect
    magic, ticket, length  ───────────────────────────────────────────────────▶  is the ticket one that was told us?
    the header, then all else of the snapshot, sendfile from the buffer itself ──▶  into the memory that it was given
    ◀──────────────────────── kept, or why not ──────────────────────────────────  hash, compare, seal

Rule 1: a ticket is drawn by the receiving agent for one transfer, told through the agents' own lines, and good once:
what connects without one, again, or late, is nothing. It is never answered.
Rule 2: memory that a copy goes into is void until the last byte has been verified: a porter that is killed at any
instant leaves no copy, or a whole one that nobody counts.
Rule 3: every wait has an end: a peer that says nothing for `SILENCE_S` is gone.
Rule 4: with its line to the agent the porter ends, in the midst of everything.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.segment import HEADER_BYTES
from everstep.clock import SYSTEM, Clock
from everstep.recovery.link import Link, LinkClosed

NICENESS = 10
MAGIC = b"EVERPEER"
TICKET_BYTES = 32
HELLO = struct.Struct(f"<8s{TICKET_BYTES}sQ")
HELLO_S = 5.0
CONNECT_S = 5.0
SILENCE_S = 15.0
SEAL_DEADLINE_S = 30.0
SEAL_POLL_S = 0.005
STRANGERS = 32
"""Connections at a time that have not shown a ticket yet; more are turned away."""
ACCEPT_AGAIN_S = 0.1
CHUNK = 8 << 20
_ANSWER = struct.Struct("<H")


class NotCarried(Exception):
    """A transfer has come to nothing; the text says why."""


def main(link: Link, *, address: str) -> None:
    """Entry of the process: serve until the line closes. `address`: where other nodes reach this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(link.fileno(),), name="everstep-porter-line", daemon=True).start()
    Porter(link, address).serve()


class Porter:
    """Serves one node."""

    def __init__(self, link: Link, address: str, clock: Clock = SYSTEM) -> None:
        self._link, self._clock = link, clock
        self._lock = threading.Lock()
        self._expected: dict[bytes, tuple[str, int]] = {}  # ticket → transfer, descriptor
        self._open: dict[str, socket.socket] = {}  # transfers that are being received
        self._strangers = threading.Semaphore(STRANGERS)
        self._door = _door(address)

    def serve(self) -> None:
        """Answer until the line closes."""
        threading.Thread(target=self._accept, name="everstep-porter-door", daemon=True).start()
        self._link.send({"kind": "door", "port": self._door.getsockname()[1]})
        while True:
            try:
                message, fds = self._link.receive()
            except LinkClosed:
                return
            match message["kind"]:
                case "expect":
                    with self._lock:
                        self._expected[bytes.fromhex(message["ticket"])] = (message["transfer"], fds.pop())
                    self._say({"kind": "expecting", "transfer": message["transfer"]})
                case "send":
                    self._begin(self._send, message, fds.pop())
                case "forget":
                    self._forget(message["transfer"])
                case _:
                    pass  # from an agent of another version
            for fd in fds:
                os.close(fd)

    # receiving

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:  # the peer has gone already, or this process has no descriptor left: others may come
                self._clock.sleep(ACCEPT_AGAIN_S)
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._welcome, args=(line,), daemon=True).start()
            else:
                line.close()

    def _welcome(self, line: socket.socket) -> None:
        """Whoever connects may be anybody, until it shows a ticket."""
        expected: tuple[str, int] | None = None
        length = 0
        try:
            with contextlib.suppress(OSError, NotCarried):
                line.settimeout(HELLO_S)
                magic, ticket, length = HELLO.unpack(
                    _exactly(line, HELLO.size, self._clock.now() + HELLO_S, self._clock)
                )
                with self._lock:
                    expected = self._expected.pop(ticket, None) if magic == MAGIC else None
                    if expected is not None:
                        self._open[expected[0]] = line
        finally:
            self._strangers.release()
            if expected is None:
                line.close()
        if expected is not None:
            self._receive(line, length, *expected)

    def _receive(self, line: socket.socket, length: int, transfer: str, fd: int) -> None:
        begun = self._clock.now()
        why = ""
        try:
            self._say({"kind": "begun", "transfer": transfer})
            _take(line, fd, length)
        except (NotCarried, OSError, ValueError) as error:
            why = _told(error)
        finally:
            os.close(fd)
        text = why.encode()[:4096]
        with contextlib.suppress(OSError):
            line.sendall(_ANSWER.pack(len(text)) + text)
        with self._lock:
            self._open.pop(transfer, None)
        line.close()
        if why:
            self._say({"kind": "refused", "transfer": transfer, "text": why})
        else:
            seconds = self._clock.now() - begun
            self._say({"kind": "received", "transfer": transfer, "bytes": length, "seconds": seconds})

    def _forget(self, transfer: str) -> None:
        with self._lock:
            waiting = [ticket for ticket, (name, _) in self._expected.items() if name == transfer]
            for ticket in waiting:
                os.close(self._expected.pop(ticket)[1])
            line = self._open.get(transfer)
            if line is not None:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
        if waiting:
            self._say({"kind": "refused", "transfer": transfer, "text": "nobody has come to send it"})

    # sending

    def _begin(self, do: Callable[[Mapping[str, Any], int], None], message: Mapping[str, Any], fd: int) -> None:
        threading.Thread(target=do, args=(message, fd), daemon=True).start()

    def _send(self, order: Mapping[str, Any], fd: int) -> None:
        begun = self._clock.now()
        answer: dict[str, Any]
        try:
            length = self._sealed_and_hashed(order, fd)
            hello = HELLO.pack(MAGIC, bytes.fromhex(order["ticket"]), length)
            with socket.create_connection((order["host"], order["port"]), CONNECT_S) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.settimeout(SILENCE_S)
                line.sendall(hello)
                _give(line, fd, length)
                (size,) = _ANSWER.unpack(_exactly(line, _ANSWER.size))
                refusal = _exactly(line, size).decode(errors="replace")
            if refusal:
                raise NotCarried(f"the receiver refuses it: {refusal}")
            answer = {"kind": "sent", "bytes": length, "seconds": self._clock.now() - begun}
        except (NotCarried, OSError, ValueError) as error:
            answer = {"kind": "refused", "text": _told(error)}
        finally:
            os.close(fd)
        self._say({**answer, "transfer": order["transfer"]})

    def _sealed_and_hashed(self, order: Mapping[str, Any], fd: int) -> int:
        """Wait for the seal, leave the checksum where nobody has; return how many bytes are to be sent."""
        deadline = self._clock.now() + SEAL_DEADLINE_S
        with mmap.mmap(fd, 0) as memory, memoryview(memory) as view:
            header = segment.parse(view)
            while isinstance(header, str) and header.startswith("void") and self._clock.now() < deadline:
                self._clock.sleep(SEAL_POLL_S)
                header = segment.parse(view)
            if isinstance(header, str):
                raise NotCarried(f"the snapshot cannot be read: {header}")
            wanted = (order["rank"], order["step"], order["epoch"], order["generation"])
            if (header.rank, header.step, header.epoch, header.generation) != wanted:
                raise NotCarried(f"the buffer holds step {header.step} of rank {header.rank}, not what was to be sent")
            if segment.checksum_of(view, header) is None:
                segment.put_checksum(view, header, segment.checksum(view, header))
            return header.meta_offset + header.meta_bytes

    def _say(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(LinkClosed):  # then we end
            self._link.send(message)


def _take(line: socket.socket, fd: int, length: int) -> None:
    """Receive one copy into memory, and verify it. Void before, void after what does not match."""
    line.settimeout(SILENCE_S)
    with mmap.mmap(fd, 0) as memory, memoryview(memory) as view:
        segment.unseal(view)
        if not HEADER_BYTES <= length <= len(view):
            raise NotCarried(f"{length} bytes are announced, for memory of {len(view)}")
        head = _exactly(line, HEADER_BYTES)
        done = HEADER_BYTES
        while done < length:
            got = line.recv_into(view[done : min(length, done + CHUNK)])
            if not got:
                raise NotCarried(f"the sender has gone after {done} of {length} bytes")
            done += got
        found = segment.complete(view, head)
        if isinstance(found, str):
            raise NotCarried(found)
        if found.meta_offset + found.meta_bytes != length:
            segment.unseal(view)
            raise NotCarried(f"{length} bytes came, where its header says {found.meta_offset + found.meta_bytes}")


def _give(line: socket.socket, fd: int, length: int) -> None:
    """Send from the buffer itself: no copy of it passes through this process."""
    line.setblocking(False)
    room = select.poll()
    room.register(line, select.POLLOUT)
    done = 0
    while done < length:
        if not room.poll(SILENCE_S * 1000):
            raise NotCarried(f"the receiver has taken nothing for {SILENCE_S:.0f} s, after {done} of {length} bytes")
        with contextlib.suppress(BlockingIOError):
            sent = os.sendfile(line.fileno(), fd, done, min(CHUNK, length - done))
            if not sent:
                raise NotCarried(f"the buffer ends after {done} of {length} bytes")
            done += sent
    line.settimeout(SILENCE_S)


def _exactly(line: socket.socket, count: int, deadline: float | None = None, clock: Clock = SYSTEM) -> bytes:
    """Receive so many bytes; by a deadline also from somebody who sends one at a time."""
    found = bytearray()
    while len(found) < count:
        if deadline is not None:
            line.settimeout(max(0.001, deadline - clock.now()))
        piece = line.recv(count - len(found))
        if not piece:
            raise NotCarried(f"the other side has gone after {len(found)} of {count} bytes")
        found += piece
    return bytes(found)


def _told(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"the other side has said nothing for {SILENCE_S:.0f} s"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _door(address: str) -> socket.socket:
    """Listen where others reach this node; everywhere, where that address is none of this machine's own."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=128)
    except OSError:
        return socket.create_server(("", 0), backlog=128)


def _end_with(line: int) -> None:
    """Wait for the other end to go, without reading; then end the process whatever it is doing."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    while not any(what & gone for _, what in poll.poll()):
        continue
    os._exit(0)
