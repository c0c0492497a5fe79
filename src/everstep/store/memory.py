"""A store inside one process: for tests, for worlds of one, and the measure for the others (it passes the same suite).

Connections share a `MemoryHost`. A test may `freeze` it (calls then end at their deadline, without waiting for it) or
`kill` it, as a real host freezes and dies.
"""

import enum
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from everstep.errors import StoreError, StoreTimeout
from everstep.store.api import check_swap, check_value


class Health(enum.Enum):
    """How a host is."""

    WELL = "well"
    FROZEN = "frozen"
    DEAD = "dead"


class MemoryHost:
    """What the connections of one store share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.health = Health.WELL

    def become(self, health: Health) -> None:
        """Freeze, kill or thaw; calls that wait notice it."""
        with self.changed:
            self.health = health
            self.changed.notify_all()


class MemoryStore:
    """One connection to a `MemoryHost`."""

    def __init__(self, host: MemoryHost | None = None, *, timeout_s: float = 5.0) -> None:
        self._host = host or MemoryHost()
        self._timeout_s = timeout_s
        self._owner: int | None = None
        self._gone = ""

    @contextmanager
    def _call(self, what: str) -> Generator[dict[str, bytes]]:
        owner = self._owner = self._owner or threading.get_ident()
        if owner != threading.get_ident():
            raise StoreError(f"{what}: this connection belongs to another thread; take a clone() for this one")
        with self._host.changed:
            self._check(what)
            yield self._host.values

    def _check(self, what: str) -> None:
        if self._gone:
            raise StoreError(f"{what}: this connection has been {self._gone}; open another one")
        if self._host.health is Health.DEAD:
            raise StoreError(f"{what}: the store's host is gone; open a store on the next one")
        if self._host.health is Health.FROZEN:
            raise StoreTimeout(f"{what}: the store's host does not answer; open a store on the next one")

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes | None:
        """See `Store.get`."""
        del timeout_s
        with self._call(f"get {key!r}") as values:
            return values.get(key)

    def set(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """See `Store.set`."""
        del timeout_s
        check_value(key, value)
        with self._call(f"set {key!r}") as values:
            values[key] = value
            self._host.changed.notify_all()

    def create(self, key: str, value: bytes, *, timeout_s: float | None = None) -> bytes:
        """See `Store.create`."""
        del timeout_s
        check_value(key, value)
        with self._call(f"create {key!r}") as values:
            self._host.changed.notify_all()
            return values.setdefault(key, value)

    def swap(self, key: str, known: bytes, value: bytes, *, timeout_s: float | None = None) -> bytes | None:
        """See `Store.swap`."""
        del timeout_s
        check_swap(key, known, value)
        with self._call(f"swap {key!r}") as values:
            if values.get(key) == known:
                values[key] = value
                self._host.changed.notify_all()
            return values.get(key)

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> bool:
        """See `Store.wait`."""
        what = f"wait for {', '.join(keys)}"

        def come() -> bool:
            self._check(what)
            return all(key in self._host.values for key in keys)

        with self._call(what):
            return self._host.changed.wait_for(come, self._timeout_s if timeout_s is None else timeout_s)

    def gather(self, keys: Sequence[str], *, timeout_s: float | None = None) -> tuple[bytes, ...] | None:
        """See `Store.gather`."""
        if not self.wait(keys, timeout_s=timeout_s):
            return None
        with self._call(f"gather {', '.join(keys)}") as values:
            return tuple(values[key] for key in keys)

    def delete(self, key: str, *, timeout_s: float | None = None) -> bool:
        """See `Store.delete`."""
        del timeout_s
        with self._call(f"delete {key!r}") as values:
            return values.pop(key, None) is not None

    def list(self, prefix: str = "", *, timeout_s: float | None = None) -> tuple[str, ...]:
        """See `Store.list`."""
        del timeout_s
        with self._call(f"list {prefix!r}") as values:
            return tuple(sorted(key for key in values if key.startswith(prefix)))

    def clone(self) -> "MemoryStore":
        """See `Store.clone`."""
        return MemoryStore(self._host, timeout_s=self._timeout_s)

    def sever(self) -> None:
        """See `Store.sever`."""
        self._end("severed")

    def close(self) -> None:
        """See `Store.close`."""
        self._end("closed")

    def _end(self, how: str) -> None:
        with self._host.changed:
            self._gone = self._gone or how
            self._host.changed.notify_all()
