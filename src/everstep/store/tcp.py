"""The store over torch's TCPStore.

TCPStore's own timeouts and successes are not trusted (EXPERIMENTS P1, P2, P8, P12):

Rule 1: every call runs under a guard that ends it at its deadline; after that the connection is dead, and says so.
Rule 2: `set` and `append` report success to a dead host (E2), so `set` is followed by a read on the same connection,
        which the host serves in order: its answer proves that the write was served.
Rule 3: compare-and-set is used with no empty value: an empty one counts as missing, and a mismatch on a missing key
        returns the *expected* value (E5). `create` expects nothing, `swap` takes that answer for "missing".
Rule 4: two threads on one client block each other for as long as one waits (E4), so the second one is refused.
Rule 5: torch's `list_keys` keeps the interpreter lock, so that no guard of ours can run beside it: it is asked only of
        a host that has just answered, and the kernel ends it (SO_RCVTIMEO).
Rule 6: a wait that ends for want of keys is told from one that ends for want of a host: the client's own timeout comes
        GRACE_S before the guard's.
Rule 7: `get` is one question: torch's own waits for a key, so that one which is deleted after a look would be waited
        for. A compare-and-set that expects what nobody writes changes nothing and answers with the value, or with what
        it expected where there is none (E5).
"""

import datetime
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from everstep.errors import StoreError, StoreTimeout
from everstep.store.api import check_swap, check_value
from everstep.store.connection import OPEN_S, Connection, brief
from everstep.store.guard import Guard

T = TypeVar("T")
GRACE_S = 0.5
_NOTHING = b"\x00everstep: nothing stands here\x00"


class TcpStore:
    """One guarded connection. See `Store` for the calls."""

    def __init__(self, connection: Connection, *, timeout_s: float = 5.0, open_s: float = OPEN_S) -> None:
        self._connection = connection
        self._timeout_s, self._open_s = timeout_s, open_s
        self._guard = Guard(f"{connection.host}:{connection.port}")
        self._owner: tuple[int, int] | None = None  # (pid, thread)
        self._gone = ""
        self.who = f"store {connection.host}:{connection.port}"

    @classmethod
    def open(cls, host: str, port: int, *, timeout_s: float = 5.0, open_s: float = OPEN_S) -> "TcpStore":
        """Connect within `open_s`; `timeout_s` is the deadline of calls that name none."""
        return cls(Connection.open(host, port, open_s), timeout_s=timeout_s, open_s=open_s)

    def _call(self, what: str, timeout_s: float | None, do: Callable[[Any], T]) -> T:
        """Run `do(client)` under the guard, and tell what became of it."""
        self._check(what)
        limit = self._timeout_s if timeout_s is None else timeout_s
        watch = self._guard.watch(limit, self._connection.sever)
        try:
            with watch:
                return do(self._connection.client)
        except RuntimeError as error:
            if watch.fired:
                self._gone = "shut down after a late answer"
                raise StoreTimeout(
                    f"{self.who}: {what} was not answered within {limit:g} s: its host is frozen, overloaded or cut "
                    "off. The connection has been shut down; open another one, or a store on the next host"
                ) from error
            self._gone = "severed" if self._connection.severed else "broken"
            raise StoreError(
                f"{self.who}: {what} failed, since the connection was {self._gone} ({brief(error)}). Whether a write "
                "stands is not known; say it again on another connection, or on the next host"
            ) from error
        finally:
            if watch.fired:
                self._gone = self._gone or "shut down after a late answer"

    def _check(self, what: str) -> None:
        me = (os.getpid(), threading.get_ident())
        owner = self._owner = self._owner or me
        if owner[0] != me[0]:
            raise StoreError(f"{self.who}: {what}: this connection was made before a fork; open one in this process")
        if owner != me:
            raise StoreError(
                f"{self.who}: {what}: this connection belongs to another thread; take a clone() for this one"
            )
        if self._connection.severed:
            self._gone = self._gone or "severed"
        if self._gone:
            raise StoreError(f"{self.who}: {what}: this connection was {self._gone}; open another one")

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes | None:
        """See `Store.get`."""
        found = self._call(f"get {key!r}", timeout_s, lambda c: bytes(c.compare_set(key, _NOTHING, _NOTHING)))
        return None if found == _NOTHING else found

    def set(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """See `Store.set`."""
        check_value(key, value)

        def put(client: Any) -> None:
            client.set(key, value)
            client.check([key])  # its answer is what counts; another writer may have deleted the key again

        self._call(f"set {key!r}", timeout_s, put)

    def create(self, key: str, value: bytes, *, timeout_s: float | None = None) -> bytes:
        """See `Store.create`."""
        check_value(key, value)
        return self._call(f"create {key!r}", timeout_s, lambda c: bytes(c.compare_set(key, "", value)))

    def swap(self, key: str, known: bytes, value: bytes, *, timeout_s: float | None = None) -> bytes | None:
        """See `Store.swap`. Where nothing stands, torch answers with what was expected (E5), and sets nothing."""
        check_swap(key, known, value)
        found = self._call(f"swap {key!r}", timeout_s, lambda c: bytes(c.compare_set(key, known, value)))
        return None if found == known else found

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> bool:
        """See `Store.wait`. Where the host does not answer, StoreTimeout comes GRACE_S after `timeout_s`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        return self._call(_waits(keys), limit + GRACE_S, lambda c: _come(c, list(keys), limit))

    def gather(self, keys: Sequence[str], *, timeout_s: float | None = None) -> tuple[bytes, ...] | None:
        """See `Store.gather`."""
        limit = self._timeout_s if timeout_s is None else timeout_s

        def fetch(client: Any) -> tuple[bytes, ...] | None:
            return tuple(map(bytes, client.multi_get(list(keys)))) if _come(client, list(keys), limit) else None

        return self._call(_waits(keys), limit + GRACE_S, fetch)

    def delete(self, key: str, *, timeout_s: float | None = None) -> bool:
        """See `Store.delete`."""
        return self._call(f"delete {key!r}", timeout_s, lambda c: bool(c.delete_key(key)))

    def list(self, prefix: str = "", *, timeout_s: float | None = None) -> tuple[str, ...]:
        """See `Store.list`."""
        limit = self._timeout_s if timeout_s is None else timeout_s

        def find(client: Any) -> list[str]:
            client.check([prefix])  # rule 5: a frozen host is found out here
            with self._connection.receive_limit(limit):
                return list(client.list_keys())

        keys = self._call(f"list {prefix!r}", timeout_s, find)
        return tuple(sorted(key for key in keys if key.startswith(prefix)))

    def clone(self) -> "TcpStore":
        """See `Store.clone`: a new connection, probed and opened as this one was."""
        return TcpStore.open(
            self._connection.host, self._connection.port, timeout_s=self._timeout_s, open_s=self._open_s
        )

    def sever(self) -> None:
        """See `Store.sever`."""
        self._connection.sever()

    def close(self) -> None:
        """See `Store.close`."""
        self._gone = self._gone or "closed"
        self._connection.close()
        self._guard.close()


def _come(client: Any, keys: list[str], limit_s: float) -> bool:
    """Wait for keys; raises where it was not they that did not come but the host."""
    if client.check(keys):
        return True
    try:
        client.wait(keys, datetime.timedelta(seconds=limit_s))
    except RuntimeError:
        return bool(client.check(keys))
    return True


def _waits(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""  # noqa: PLR2004 - enough to know which they are
    return f"wait for {', '.join(keys[:3])}{more}"
