"""Serves the end point on the agent's loop.

Rule 1: nothing blocks, and nothing is kept for long: so many connections, so many new ones a second, so many bytes,
        so many seconds each. Whoever does not read, or says nothing, is let go.
Rule 2: a connection that is new takes the place of the oldest, so that silent ones do not keep an operator out.
Rule 3: an error of the end point is answered with 500 and told once; it never reaches the agent.
"""

import contextlib
import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.errors import ConfigurationError
from everstep.launcher.control.core.http import Request, Response, parse, refusal
from everstep.process.loop import Loop, Timer

MOST_CONNECTIONS = 64
BATCH, PAUSE_S = 16, 0.05
"""So many are accepted in so long: a flood costs the loop some percent of a core, and waits in the kernel."""
READ_S, THINK_S, WRITE_S = 5.0, 15.0, 10.0
"""For a request to come whole, for its answer to be found, for that to be read."""
NO_ROOM_S = 1.0
"""Without a free descriptor nobody is accepted for so long: a loop would turn round an error."""
Answer = Callable[[Response], None]
Serve = Callable[[Request, Answer], None]
"""(request, answer): call `answer` once, now or later; after the connection has ended that is nothing."""


@dataclass(eq=False)
class _Connection:
    line: socket.socket
    timer: Timer | None = None
    read: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    asked: bool = False


class Server:
    """One listening socket and its connections; all on the loop's thread."""

    def __init__(self, loop: Loop, host: str, port: int, serve: Serve, trouble: Callable[[str], None]) -> None:
        """Listen; ConfigurationError where that cannot be. `trouble` hears a sentence about an error of ours, once."""
        self._loop, self._serve, self._trouble = loop, serve, trouble
        try:
            self._door = _listen(host, port)
        except (OSError, ValueError, TypeError) as error:  # or what no name server can be asked for
            why = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"{host}:{port} cannot be listened at: {why}; name another with --control-endpoint"
            ) from None
        self.address: tuple[str, int] = self._door.getsockname()[:2]
        self._lines: dict[_Connection, None] = {}  # the oldest first
        self._batch = 0
        self._told = False
        self._open = True
        loop.watch(self._door.fileno(), self._accept)

    def _accept(self) -> None:
        self._batch += 1
        if self._batch == 1:
            self._loop.later(PAUSE_S, self._begin_batch)
        if self._batch > BATCH:
            self._loop.unwatch(self._door.fileno())
            return
        try:
            line, _ = self._door.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor is free
            self._batch = BATCH + 1
            self._loop.unwatch(self._door.fileno())
            self._loop.later(NO_ROOM_S, self._begin_batch)
            return
        line.setblocking(False)
        if len(self._lines) >= MOST_CONNECTIONS:
            self._end(next(iter(self._lines)))
        connection = _Connection(line)
        self._limit(connection, READ_S)
        self._lines[connection] = None
        self._loop.watch(line.fileno(), functools.partial(self._read, connection))

    def _limit(self, connection: _Connection, seconds: float) -> None:
        """From here on it has so long."""
        if connection.timer is not None:
            connection.timer.call = None
        connection.timer = self._loop.later(seconds, functools.partial(self._end, connection))

    def _begin_batch(self) -> None:
        if self._open:
            self._batch = 0
            self._loop.watch(self._door.fileno(), self._accept)

    def _read(self, connection: _Connection) -> None:
        try:
            piece = connection.line.recv(16 * 1024)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if connection.asked:  # what follows a request is not read; its end is that of a client that only listens
            if not piece:
                self._loop.unwatch(connection.line.fileno())
            return
        if not piece:
            self._end(connection)
            return
        connection.read += piece
        found = parse(bytes(connection.read))
        if found is not None:
            self._take(connection, found)

    def _take(self, connection: _Connection, found: Request | Response) -> None:
        connection.asked = True
        connection.read.clear()
        self._limit(connection, THINK_S)
        answer = functools.partial(self._answer, connection)
        if isinstance(found, Response):
            answer(found)
        else:
            self._ask(found, answer)

    def _ask(self, request: Request, answer: Answer) -> None:
        try:
            self._serve(request, answer)
        except Exception as error:  # noqa: BLE001 - rule 3
            answer(refusal(500, f"the agent failed over this: {type(error).__name__}: {error}"))
            if not self._told:
                self._told = True
                self._trouble(f"the control end point failed over {request.path}: {type(error).__name__}: {error}")

    def _answer(self, connection: _Connection, response: Response) -> None:
        if connection not in self._lines or connection.unsent:
            return
        self._limit(connection, WRITE_S)
        connection.unsent = memoryview(response.encode())
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                sent = connection.line.send(connection.unsent[: 1 << 18])
                connection.unsent = connection.unsent[sent:]
        except BlockingIOError:
            self._loop.watch(connection.line.fileno(), functools.partial(self._write, connection), write=True)
            return
        except OSError:
            pass
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if connection in self._lines:
            del self._lines[connection]
            if connection.timer is not None:
                connection.timer.call = None
            self._loop.unwatch(connection.line.fileno())
            with contextlib.suppress(OSError):
                connection.line.shutdown(socket.SHUT_WR)
            connection.line.close()

    def close(self) -> None:
        """Stop listening; what is being answered is cut."""
        if self._open:
            self._open = False
            self._loop.unwatch(self._door.fileno())
            self._door.close()
            for connection in list(self._lines):
                self._end(connection)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, port))
        door.listen(128)
    except BaseException:
        door.close()
        raise
    return door
