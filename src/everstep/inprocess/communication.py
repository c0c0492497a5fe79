"""End all communication of the failed attempt, from another thread, while the main thread is blocked inside it.

A gloo collective hears neither signals nor `abort()` (measured, torch 2.13); it ends 1 ms after its sockets are shut
down. `init_process_group` waits in the store (E10) and ends when the generation's own connection is shut down. NCCL and
other backends are aborted by their own call (`nccl.py`).

Rule 1: what is severed is known by what it is: an epoll set that appeared while c10d made a group and has a listening
        TCP socket in it (gloo), a connection that we opened for this generation (store).
Rule 2: `abort` touches no bookkeeping of torch; the main thread does that in `finish`, once it has left the function.
Rule 3: each step has a deadline. What is late is named in `Aborted`, and the caller replaces the worker. A backend's
        own abort is waited for by nobody (`behind.py`): the next generation begins meanwhile; the next abort, which may
        find it still at it, names it as late.
Rule 4: a connection to the store that nobody waits in is kept for the next generation: to open one looks names up, and
        a lost DNS packet costs seconds (seen). A second abort severs it in any case.
Rule 5: peers see nothing of an abort. Gloo loses a send that fails in its event loop, and whoever waits for it waits
        for ever (seen with four ranks, in one restart of twelve). So each rank ends its own reading, which its own loop
        takes well, and the connections stay up until the next generation opens something: everybody has left this one.
Rule 6: every group is held here until what used it is gone. DDP's reducer is freed with the interpreter lock held; if
        it holds the last reference, gloo's destructor joins a thread that may be waiting for that lock, for ever (seen,
        torch 2.13: `destroy_process_group()`, then the model). Ours is let go of without the lock.
"""

import functools
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from everstep.clock import SYSTEM, Clock
from everstep.inprocess import groups, nccl, sockets
from everstep.inprocess.behind import Behind
from everstep.inprocess.frames import inside
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
    backends: tuple[str, ...]  # groups whose own abort was called, and resources that were ended
    behind: tuple[str, ...]  # of those, the ones that go on behind
    late: tuple[str, ...]  # not ended within the deadline; or behind since an earlier generation, and still at it
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
    groups: list[Any] = field(default_factory=list[Any])  # ProcessGroups
    aborts: int = 0


class Communication:
    """All communication of this process's wrapped function."""

    def __init__(self, registry: Registry = REGISTRY, clock: Clock = SYSTEM) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._ended: list[socket.socket] = []  # connections that we do not read any more
        self._books = _Books()
        self._behind = Behind(clock)
        self._generations = 0  # that were aborted: groups of each have the same names
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
            self._forget_destroyed()
            with self.opening():
                result = made(*args, **kwargs)
            self._hold(result[0] if isinstance(result, tuple) else result)
            return result

        setattr(c10d, _HELPER, watched)
        self._unhook = lambda: setattr(c10d, _HELPER, made)
        return True

    def unwatch(self) -> None:
        """Give c10d back as it was."""
        self.release()
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    @contextmanager
    def opening(self, port: int | None = None) -> Generator[None]:
        """Something of this generation is being opened: a group, or a connection to the store at `port`."""
        if not self._books.aborts:  # a new generation is entered: everybody has left the last one
            self.release()
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
        aborts = nccl.aborts()
        with self._lock:
            for window in self._books.windows:
                self._settle(window)
            epolls, stores = dict(self._books.sets), {h.inode: h for h in self._books.stores}
            first = not self._books.aborts
            waited_in = bool(self._books.windows or not first or aborts) or _waits_in_store()
            self._books.aborts += 1
            self._generations += first
        severed = self._end_reading(epolls) if first else self._sever(epolls)
        cut = sum(sockets.sever(handle) for handle in stores.values()) if waited_in else 0
        stuck = self._behind.wait(deadline_s) if first else ()
        self._behind.begin({f"{name} ({self._generations})": call for name, call in aborts.items()})
        enders = self._registry.enders()
        ended = together(enders, deadline_s, self._clock) if enders else None
        resources, late, failed = (ended.ended, ended.late, ended.failed) if ended else ((), (), ())
        return Aborted(
            severed=severed, stores=cut, backends=(*aborts, *resources), behind=self._behind.running(),
            late=stuck + late, failed=self._behind.failed() + failed, seconds=self._clock.now() - began,
        )  # fmt: skip

    def _end_reading(self, epolls: Mapping[int, frozenset[Handle]]) -> int:
        ended = [end for handle in _connections(epolls) if (end := sockets.end_reading(handle)) is not None]
        with self._lock:
            self._ended += ended
        return len(ended)

    def _sever(self, epolls: Mapping[int, frozenset[Handle]]) -> int:
        self.release()
        return sum(sockets.sever(handle) for handle in _connections(epolls))

    def release(self) -> None:
        """Let the peers see the end of the connections that `abort` has left: nobody of the generation needs them."""
        with self._lock:
            ended, self._ended = self._ended, []
        for end in ended:
            end.close()

    def unfinished(self, deadline_s: float) -> tuple[str, ...]:
        """Wait for the aborts that go on behind; name those that do not end. For the end of a process."""
        return self._behind.wait(deadline_s)

    def failures(self) -> tuple[str, ...]:
        """Tell which aborts behind have failed since this, or `abort`, was last asked."""
        return self._behind.failed()

    def finish(self) -> None:
        """Destroy the groups and forget the generation. Main thread, after the function has been left.

        Groups whose abort goes on behind are only forgotten: to destroy them waits for it.
        """
        try:
            if self._behind.running():
                groups.forget()
            elif dist.is_initialized():
                dist.destroy_process_group()
        finally:
            with self._lock:
                self._books.sets.clear()
                self._books.stores.clear()
                self._books.ports.clear()
                self._books.aborts = 0

    def let_go(self) -> None:
        """Free the groups: whoever used them is gone. Main thread, after `finish` and a collection."""
        with self._lock:
            groups, self._books.groups = self._books.groups, []
        groups.clear()

    def _hold(self, group: Any) -> None:
        if isinstance(group, dist.ProcessGroup):
            with self._lock:
                self._books.groups.append(group)

    def _forget_destroyed(self) -> None:
        """A script that makes and destroys groups one after another keeps one too many, not all: its work is done."""
        known = c10d._world.pg_map  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        with self._lock:
            groups, self._books.groups = self._books.groups, [g for g in self._books.groups if g in known]
        groups.clear()

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


def _connections(epolls: Mapping[int, frozenset[Handle]]) -> Iterator[Handle]:
    """Yield what the devices hold, as far as each descriptor is still that device's: it holds the same listener."""
    for epoll, listeners in epolls.items():
        present = sockets.members(epoll)
        if listeners & present:
            yield from present


def _waits_in_store() -> bool:
    """Tell whether a thread is inside a call of c10d that waits for peers in the store."""
    return inside(lambda code: code.co_filename == _C10D_FILE and code.co_name in _WAITS_IN_STORE)
