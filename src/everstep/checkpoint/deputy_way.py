"""The way from the keeper of one host to the leading one: every address that it may have, until one proves to be it.

A host has several addresses, and some of them (of a bridge for containers, say) exist on other hosts as well: who
listens there is asked for its proof (host_line.py). Addresses are numbers; nothing here asks a name server.
"""

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Sequence

from everstep.checkpoint.host_line import Arrival, HostLine
from everstep.process.loop import Loop

REACH_S = 60.0
TRY_S = 5.0
AGAIN_S = 0.5


class Way:
    """Tries until `known(line)` or, after REACH_S, `failed(reasons)` is called: by address, the last one of each."""

    def __init__(
        self,
        loop: Loop,
        where: tuple[Sequence[str], int],
        who: tuple[str, int],
        known: Callable[[HostLine], None],
        failed: Callable[[str], None],
    ) -> None:
        """`where`: addresses and the port. `who`: the token, and the number of our host."""
        self._loop, self._known, self._failed = loop, known, failed
        (self._addresses, self._port), (self._token, self._number) = where, who
        self._whys = dict.fromkeys(self._addresses, "nobody answers")
        self._arrivals: dict[str, Arrival] = {}
        self._connecting: dict[str, socket.socket] = {}
        self._over = False
        loop.later(REACH_S, self._too_late)
        for address in self._addresses:
            self._try(address)

    def close(self) -> None:
        """Nobody wants to get there any more."""
        self._over = True
        for end in self._connecting.values():
            self._loop.unwatch(end.fileno())
            end.close()
        for arrival in self._arrivals.values():
            arrival.line.drop()
        self._connecting.clear()
        self._arrivals.clear()

    def _try(self, address: str) -> None:
        if self._over:
            return
        try:
            family, _, _, _, where = socket.getaddrinfo(
                address, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            end = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            self._again(address, error.strerror or str(error))
            return
        with contextlib.suppress(OSError):  # told when it can be written to, like its success
            end.connect_ex(where)
        self._connecting[address] = end
        self._loop.watch(end.fileno(), functools.partial(self._connected, address, end), write=True)
        self._loop.later(TRY_S, functools.partial(self._give_up, address, end))

    def _connected(self, address: str, end: socket.socket) -> None:
        self._loop.unwatch(end.fileno())
        del self._connecting[address]
        code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code or end.getsockname() == end.getpeername():  # the kernel may deal us the very port that we look for
            end.close()
            self._again(address, os.strerror(code) if code else "nobody listens there")
            return

        def known(line: HostLine) -> None:
            del self._arrivals[address]
            self.close()
            self._known(line)

        def failed(why: str) -> None:
            self._arrivals.pop(address, None)
            self._again(address, why)

        self._arrivals[address] = Arrival(self._loop, end, self._token, self._number, known, failed)

    def _give_up(self, address: str, end: socket.socket) -> None:
        if self._connecting.get(address) is end:
            self._loop.unwatch(end.fileno())
            del self._connecting[address]
            end.close()
            self._again(address, "nobody answers")

    def _again(self, address: str, why: str) -> None:
        if not self._over:
            self._whys[address] = why
            self._loop.later(AGAIN_S, functools.partial(self._try, address))

    def _too_late(self) -> None:
        if not self._over:
            self.close()
            whys = "; ".join(f"{address} port {self._port}: {why}" for address, why in self._whys.items())
            self._failed(whys)
