"""The porter: one process of each node that sends snapshots to other nodes, and receives theirs.

It is forked from the zygote, reads and writes what its agent holds, by descriptor, and speaks TCP to other porters. The
agent never touches a byte; what has been received outlives us.

    expect {transfer, ticket} + memory, and snapshots here that may hold parts of what comes
                                             → expecting {transfer}, begun {transfer},
                                               received {transfer, bytes, seconds} | refused {transfer, text, again}
    forget {transfer}                        (nobody shall come any more; one who has come is cut off)
    send {transfer, ticket, host, port, rank, step, epoch, generation} + snapshot
                                             → sent {transfer, bytes, seconds} | refused {transfer, text, again}
                                             ← door {port}: at the start

A sender leaves the checksum where nobody has (the copy is hashed from here on), connects, and shows its ticket; what is
said then is in carrying.py. `bytes` are those that went over the line; `again`: it was the line, not the copy.

Rule 1: a ticket is drawn by the receiving agent for one transfer, told through the agents' own lines, and good once:
what connects without one, again, or late, is nothing. It is never answered.
Rule 2: a porter that is killed at any instant leaves no copy, or a whole one that nobody counts.
Rule 3: with its line to the agent the porter ends, in the midst of everything.
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

from everstep.checkpoint import carrying
from everstep.checkpoint.carrying import SILENCE_S, NotCarried, exactly
from everstep.checkpoint.core import segment
from everstep.clock import SYSTEM, Clock
from everstep.recovery.link import Link, LinkClosed

NICENESS = 10
MAGIC = b"EVERPEER"
TICKET_BYTES = 32
HELLO = struct.Struct(f"<8s{TICKET_BYTES}sQ")
HELLO_S = 5.0
CONNECT_S = 5.0
SEAL_DEADLINE_S = 30.0
SEAL_POLL_S = 0.005
STRANGERS = 32
"""Connections at a time that have not shown a ticket yet; more are turned away."""
ACCEPT_AGAIN_S = 0.1


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
        self._expected: dict[bytes, tuple[str, list[int]]] = {}  # ticket → transfer, descriptors
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
                        self._expected[bytes.fromhex(message["ticket"])] = (message["transfer"], list(fds))
                    fds = []
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
        expected: tuple[str, list[int]] | None = None
        length = 0
        try:
            with contextlib.suppress(OSError, NotCarried):
                line.settimeout(HELLO_S)
                magic, ticket, length = HELLO.unpack(
                    exactly(line, HELLO.size, self._clock.now() + HELLO_S, self._clock)
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

    def _receive(self, line: socket.socket, length: int, transfer: str, fds: list[int]) -> None:
        begun, came = self._clock.now(), 0
        why, again = "", False
        try:
            self._say({"kind": "begun", "transfer": transfer})
            came = carrying.take(line, fds[0], length, fds[1:])
        except (NotCarried, OSError, ValueError) as error:
            why, again = _told(error), _again(error)
        finally:
            _close(fds)
        with contextlib.suppress(OSError):
            carrying.answer(line, why)
        with self._lock:
            self._open.pop(transfer, None)
        line.close()
        if why:
            self._say({"kind": "refused", "transfer": transfer, "text": why, "again": again})
        else:
            seconds = self._clock.now() - begun
            self._say({"kind": "received", "transfer": transfer, "bytes": came, "seconds": seconds})

    def _forget(self, transfer: str) -> None:
        with self._lock:
            waiting = [ticket for ticket, (name, _) in self._expected.items() if name == transfer]
            for ticket in waiting:
                _close(self._expected.pop(ticket)[1])
            line = self._open.get(transfer)
            if line is not None:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
        if waiting:
            told = {"text": "nobody has come to send it", "again": True}
            self._say({"kind": "refused", "transfer": transfer, **told})

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
                went = carrying.give(line, fd, length)
            answer = {"kind": "sent", "bytes": went, "seconds": self._clock.now() - begun}
        except (NotCarried, OSError, ValueError) as error:
            answer = {"kind": "refused", "text": _told(error), "again": _again(error)}
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


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _again(error: Exception) -> bool:
    return isinstance(error, carrying.Gone | OSError)


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
