"""One connection of torch's TCPStore client, that any thread can end.

Rule 1: nothing is opened before the end point has answered a bounded probe, and the constructor itself is guarded: at
        its deadline, the sockets to this end point that have appeared since are shut down.
Rule 2: the descriptor is taken from the client's repr, checked against the end point, and duplicated, so that shutting
        it down can never hit a stranger that got its number later.
Rule 3: process groups get a connection of their own (`client`), which abort severs: a wait inside
        `init_process_group` hears no signal (E10).
"""

import contextlib
import datetime
import os
import re
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed import TCPStore

from everstep.clock import SYSTEM
from everstep.errors import StoreError, StoreTimeout
from everstep.store.guard import Guard
from everstep.store.probe import probe

OPEN_S = 15.0
"""To open a client. Milliseconds, but for one thing: torch looks up the name of the address (getnameinfo), and a lost
DNS packet costs the resolver's timeout, 5 s by default (`RES_OPTIONS=timeout:1` shortens it)."""

_opening = threading.Lock()
"""One client is opened at a time in a process, so that the sockets which appear meanwhile are its own."""


class Connection:
    """A client of a TCPStore. `client` is torch's; `sever` and `close` may be called from any thread."""

    def __init__(self, host: str, port: int, client: Any) -> None:
        self.host, self.port, self.client = host, port, client
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._socket: socket.socket | None = _descriptor(host, port, client)
        self.severed = False

    @classmethod
    def open(cls, host: str, port: int, timeout_s: float = OPEN_S) -> "Connection":
        """Connect within `timeout_s`. Raises StoreError or StoreTimeout."""
        deadline = SYSTEM.now() + timeout_s
        probe(host, port, timeout_s)
        if not _opening.acquire(timeout=max(0.001, deadline - SYSTEM.now())):
            raise StoreTimeout(f"store {host}:{port}: another client was being opened for {timeout_s:g} s")
        try:
            return cls(host, port, _construct(host, port, max(0.05, deadline - SYSTEM.now())))
        finally:
            _opening.release()

    def sever(self) -> None:
        """Shut the connection down: whoever is inside a call of the client gets an error at once.

        In a forked child this does nothing: the connection is its parent's.
        """
        with self._lock, contextlib.suppress(OSError):
            self.severed = True
            if self._socket is not None and self._pid == os.getpid():
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def receive_limit(self, timeout_s: float) -> Generator[None]:
        """Have the kernel end a receive that takes longer: for calls that keep the interpreter lock from the guard."""
        line = self._socket
        if line is None:
            yield
            return
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0))

    def in_step(self) -> bool:
        """Tell whether the connection is open and no answer is under way, so that it can serve somebody else."""
        with self._lock:
            if self.severed or self._socket is None:
                return False
            try:
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
        return False  # the end of the line, or an answer that nobody has read

    def fileno(self) -> int:
        """Our descriptor of the connection, -1 when it is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Sever it, and let go of our descriptor and of the client."""
        self.sever()
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket, self.client = None, None


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _construct(host: str, port: int, timeout_s: float) -> Any:
    before = set(_sockets())
    guard = Guard("open")
    watch = guard.watch(timeout_s, lambda: _shut_new(before, port))
    try:
        with watch:
            return TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s)
            )  # fmt: skip
    except RuntimeError as error:
        if watch.fired:
            raise StoreTimeout(
                f"store {host}:{port} answered a probe, but took no client within {timeout_s:g} s"
            ) from error
        raise StoreError(f"store {host}:{port} refuses a client: {brief(error)}") from error
    finally:
        guard.close()


def _sockets() -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _shut_new(before: set[int], port: int) -> None:
    """End the connection that a constructor is waiting on."""
    for fd in set(_sockets()) - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername()[1] == port:
                line.shutdown(socket.SHUT_RDWR)


def _descriptor(host: str, port: int, client: Any) -> socket.socket:
    found = re.search(r"client=TCPClient\(SocketImpl\(fd=(\d+),", repr(client))
    line = socket.socket(fileno=os.dup(int(found[1]))) if found else None
    if line is None or line.getpeername()[1] != port:
        raise StoreError(
            f"store {host}:{port}: this version of torch does not show its client's descriptor ({client!r}), so its "
            "calls cannot be given a deadline; use a version that the README names"
        )
    return line


def brief(error: BaseException) -> str:
    """Return the first line of what torch says: the rest is a stack in C++."""
    return str(error).partition("\n")[0][:200] or type(error).__name__
