"""End all communication of the failed attempt, from another thread, while the main thread is blocked inside it.

A gloo collective hears neither signals nor `abort()` (measured, torch 2.13); it ends 1 ms after its sockets are shut
down. `init_process_group` waits in the store (E10) and ends when the generation's own connection is shut down. NCCL and
other backends are aborted by their own call (`nccl.py`).

Rule 1: what is severed is known by what it is: an epoll set that appeared while c10d made a group and has a listening
        TCP socket in it (gloo), a connection that we opened for this generation (store).
Rule 2: `abort` touches no bookkeeping of torch; the main thread does that in `finish`, once it has left the function.
Rule 3: each step has a deadline. What is late is named in `Aborted`, and the caller replaces the worker.
Rule 4: a connection to the store that nobody waits in is kept for the next generation: to open one looks names up, and
        a lost DNS packet costs seconds (seen). A second abort severs it in any case.
"""

import functools
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from everstep.clock import SYSTEM, Clock
from everstep.inprocess import nccl, sockets
from everstep.inprocess.sockets import Handle
from everstep.resources import REGISTRY, Registry, together

_HELPER = "_new_process_group_helper"
_C10D_FILE = c10d.__file__
_WAITS_IN_STORE = frozenset(
    (
        "init_process_group",
        "new_group",
        "_new_group_with_tag",
        "split_group",
        "_new_process_group_helper",
        "_store_based_barrier",
    )
)
"""Functions of c10d that wait in the store, for peers that may never come."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """What an abort did."""

    severed: int  # connections between ranks
    stores: int  # connections to a store
    backends: tuple[str, ...]  # groups ended by their own abort
    late: tuple[str, ...]  # not ended within the deadline
    failed: tuple[str, ...]
    seconds: float

    @property
    def clean(self) -> bool:
        """True where everything was ended in time."""
        return not self.late and not self.failed


@dataclass
class _Window:
    """A time in which c10d makes a group or we open a store: what appears meanwhile is looked at."""

    epolls: set[int]
    sockets: frozenset[Handle]


@dataclass
class _Books:
    """What belongs to the present generation. Guarded by `Communication._lock`."""

    sets: dict[int, frozenset[Handle]] = field(default_factory=dict[int, frozenset[Handle]])  # epoll fd → its listeners
    stores: set[Handle] = field(default_factory=set[Handle])
    ports: set[int] = field(default_factory=set[int])  # of the stores
    windows: list[_Window] = field(default_factory=list[_Window])
    aborts: int = 0


class Communication:
    """All communication of this process's wrapped function."""

    def __init__(self, registry: Registry = REGISTRY, clock: Clock = SYSTEM) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._books = _Books()
        self._unhook: Callable[[], None] | None = None

    def watch(self) -> bool:
        """Begin to note the groups that c10d makes. False where this torch has no place to look from.

        Then `abort` judges every epoll set that has come since, which is the same unless the user's function runs a
        server of its own on threads of C++.
        """
        if self._unhook is not None:
            return True
        made = getattr(c10d, _HELPER, None)
        if made is None:
            self._books.windows.append(self._open_window())
            return False

        @functools.wraps(made)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.opening():
                return made(*args, **kwargs)

        setattr(c10d, _HELPER, watched)
        self._unhook = lambda: setattr(c10d, _HELPER, made)
        return True

    def unwatch(self) -> None:
        """Give c10d back as it was."""
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    @contextmanager
    def opening(self, port: int | None = None) -> Generator[None]:
        """Something of this generation is being opened: a group, or a connection to the store at `port`."""
        window = self._open_window()
        with self._lock:
            self._books.windows.append(window)
            if port is not None:
                self._books.ports.add(port)
        try:
            yield
        finally:
            with self._lock:
                self._settle(window)
                self._books.windows.remove(window)

    def adopt(self, port: int, fd: int) -> None:
        """A connection to the store, opened earlier, serves this generation too."""
        with self._lock:
            self._books.ports.add(port)
            self._books.stores |= {handle for at, handle in sockets.sockets().items() if at == fd}

    def abort(self, deadline_s: float) -> Aborted:
        """End what this generation communicates with. From any thread; may be called again."""
        began = self._clock.now()
        enders = nccl.enders()
        with self._lock:
            for window in self._books.windows:
                self._settle(window)
            groups, stores = dict(self._books.sets), {h.inode: h for h in self._books.stores}
            waited_in = bool(self._books.windows or self._books.aborts or enders) or _waits_in_store()
            self._books.aborts += 1
        severed = sum(_sever_set(epoll, listeners) for epoll, listeners in groups.items())
        cut = sum(sockets.sever(handle) for handle in stores.values()) if waited_in else 0
        enders |= self._registry.enders()
        ended = together(enders, deadline_s, self._clock) if enders else None
        backends, late, failed = (ended.ended, ended.late, ended.failed) if ended else ((), (), ())
        return Aborted(severed, cut, backends, late, failed, self._clock.now() - began)

    def finish(self) -> None:
        """Destroy the groups and forget the generation. Main thread, after the function has been left."""
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            with self._lock:
                self._books.sets.clear()
                self._books.stores.clear()
                self._books.ports.clear()
                self._books.aborts = 0

    def _open_window(self) -> _Window:
        return _Window(sockets.epoll_sets(), frozenset(sockets.sockets().values()))

    def _settle(self, window: _Window) -> None:
        """Note what has come since the window was opened, and is ours by what it is."""
        for epoll in sockets.epoll_sets() - window.epolls:
            listeners = frozenset(handle for handle in sockets.members(epoll) if sockets.listens(handle))
            if listeners:
                self._books.sets[epoll] = listeners
        if self._books.ports:
            come = set(sockets.sockets().values()) - window.sockets
            self._books.stores |= {handle for handle in come if sockets.remote_port(handle) in self._books.ports}


def _sever_set(epoll: int, listeners: frozenset[Handle]) -> int:
    """Sever the connections of one device, if the descriptor is still that device's: it holds the same listener."""
    present = sockets.members(epoll)
    return sum(sockets.sever(handle) for handle in present) if listeners & present else 0


def _waits_in_store() -> bool:
    """Tell whether the main thread is inside a call of c10d that waits for peers in the store."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_filename == _C10D_FILE and frame.f_code.co_name in _WAITS_IN_STORE:
            return True
        frame = frame.f_back
    return False
