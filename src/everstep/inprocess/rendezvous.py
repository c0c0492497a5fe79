"""Where the ranks of one generation meet: on a prefix of the living store, over a connection of the generation's own.

torch 2.13's `env://` hands out the launcher's store as it is, expecting a new one for each restart (EXPERIMENTS P10,
E12: old addresses, then a failed mesh). While a generation is entered, ours serves `env://` in its place.

Rule 1: each generation has its place (`store.keys`) for a prefix; a second default group within it has one of its own.
Rule 2: each connection is opened inside `Communication.opening`, so that abort finds and severs it, half-open or not.
Rule 3: a connection that the last generation left in step is taken up again; what was severed is not.
Rule 4: opening is bounded, and begins with a probe that a signal ends (P1); torch's own constructor comes after it.
"""

import importlib
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from everstep.inprocess.communication import Communication
from everstep.store import keys
from everstep.store.connection import OPEN_S, Connection
from everstep.store.probe import probe

GROUP_S = 1800.0
"""Until a group's own calls give up. Faults are noticed by others, far earlier."""
_SCHEME = "env"
Served = tuple[dist.Store, int, int]


class Place(Protocol):
    """One generation as this rank was told of it; `inprocess.assignment.Assignment` is one."""

    @property
    def generation(self) -> int:
        """Its number, within the epoch."""
        ...

    @property
    def epoch(self) -> int:
        """The life of the store's host."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks meet."""
        ...

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the store."""
        ...


class Meeting:
    """Opens a generation's store and makes its default group."""

    def __init__(self, communication: Communication, open_s: float = OPEN_S, group_s: float = GROUP_S) -> None:
        self._communication = communication
        self._open_s, self._group_s = open_s, group_s
        self._lock = threading.Lock()
        self._place: Place | None = None
        self._opened: list[Connection] = []
        self._groups = 0  # opened for groups in this generation
        self._kept: Connection | None = None

    @contextmanager
    def entered(self, place: Place) -> Generator[None]:
        """While this lasts, `env://` leads to `place`'s prefix."""
        handlers = _handlers()
        before, outer = handlers.get(_SCHEME), self._place
        self._place = place
        handlers[_SCHEME] = self._serve
        try:
            yield
        finally:
            self._place = outer
            if before is not None:
                handlers[_SCHEME] = before

    def init_process_group(self, backend: str, **options: Any) -> None:
        """Make the default group of the place that is entered."""
        place = self._present()
        options.setdefault("timeout", timedelta(seconds=self._group_s))
        store = self.open()
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, **options)

    def open(self) -> dist.Store:
        """Open a connection of this generation's own; return the store that its next group meets on."""
        with self._lock:
            number, self._groups = self._groups, self._groups + 1
        return self._opened_at(f"/{number}" if number else "")

    def aside(self) -> dist.Store:
        """The same for what is no group: keys of this generation that no group's keys meet, on whichever rank asks."""
        return self._opened_at("/aside")

    def _opened_at(self, suffix: str) -> dist.Store:
        place = self._present()
        host, port = place.store
        connection = self._take(host, port) or self._connect(host, port)
        with self._lock:
            self._opened.append(connection)
        client: Any = connection.client
        client.set_timeout(timedelta(seconds=self._group_s))
        return dist.PrefixStore(keys.place(place.epoch, place.generation) + suffix, client)

    def leave(self) -> None:
        """Let go of the generation's connections, but for one that may serve the next. Main thread, groups are gone."""
        with self._lock:
            opened, self._opened, self._groups = self._opened, [], 0
        for connection in opened:
            if self._kept is None and connection.in_step():
                self._kept = connection
            else:
                connection.close()

    def close(self) -> None:
        """Let go of everything."""
        self.leave()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _take(self, host: str, port: int) -> Connection | None:
        """Return the connection that the last generation left, if it leads to this store and the store answers."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        if (kept.host, kept.port) == (host, port) and kept.in_step():
            probe(host, port, self._open_s)
            self._communication.adopt(port, kept.fileno())
            return kept
        kept.close()
        return None

    def _connect(self, host: str, port: int) -> Connection:
        with self._communication.opening(port):
            return Connection.open(host, port, self._open_s)

    def _present(self) -> Place:
        if self._place is None:
            raise RuntimeError(
                "no generation is entered: process groups are made inside the wrapped function. Move "
                "init_process_group into it, or leave it out (everstep.resilient makes the default group)."
            )
        return self._place

    def _serve(self, url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[Served]:
        """What `init_process_group()` with the environment's words comes to."""
        place = self._present()
        said = dict(parse_qsl(urlparse(url).query))
        rank, world = int(said.get("rank", place.rank)), int(said.get("world_size", place.world_size))
        store = self.open()
        if timeout is not None:
            store.set_timeout(timeout)
        yield store, rank, world
        raise RuntimeError("a generation is met once; a lost rank begins the next one")


def _handlers() -> dict[str, Callable[..., Iterator[Served]]]:
    """Torch's table of schemes: `register_rendezvous_handler` refuses a scheme that is there already."""
    module = importlib.import_module("torch.distributed.rendezvous")  # the package's attribute is a function
    table = getattr(module, "_rendezvous_handlers", None)
    return table if isinstance(table, dict) else {}
