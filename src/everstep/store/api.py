"""What Everstep asks of a store, and what it promises about it.

Rule 1: every call ends by its deadline, with an answer or with StoreTimeout (the host did not answer in time).
Rule 2: a write counts when the call returns: the host has answered after it. A StoreError from a write means "unknown":
        it may stand or not; say it again, which is safe for all calls here.
Rule 3: things are decided by `create`, which makes a key once, or by `swap`, which replaces exactly what one knows.
        Whoever finds its own value standing has won, so values that compete carry their writer's id. An empty value is
        refused: TCPStore takes it for none.
Rule 4: a store object is one connection with one owner: the first thread that calls it. Another thread takes a `clone`.
Rule 5: no value is larger than MAX_VALUE; larger things travel elsewhere (TCPStore drops a connection above 8 MiB).
"""

from collections.abc import Sequence
from typing import Protocol

from everstep.errors import UsageError

MAX_VALUE = 1 << 20


class Store(Protocol):
    """One connection to a store. `timeout_s` left out means the one given when the store was opened."""

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes | None:
        """Return the value, or None where the key is not there. Never waits for a key."""
        ...

    def set(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """Put the value; return when the host has answered."""
        ...

    def create(self, key: str, value: bytes, *, timeout_s: float | None = None) -> bytes:
        """Put the value if the key is not there; return what stands. Equal to one's own: won, now or before."""
        ...

    def swap(self, key: str, known: bytes, value: bytes, *, timeout_s: float | None = None) -> bytes | None:
        """Put the value if exactly `known` stands; return what stands, None where nothing does. `known` is another."""
        ...

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> bool:
        """Wait until all keys are there: True. False where the host is well and the keys have not come in time."""
        ...

    def gather(self, keys: Sequence[str], *, timeout_s: float | None = None) -> tuple[bytes, ...] | None:
        """Wait as `wait` does; return the values in one answer, or None where they have not come in time."""
        ...

    def delete(self, key: str, *, timeout_s: float | None = None) -> bool:
        """Remove the key; True if it was there."""
        ...

    def list(self, prefix: str = "", *, timeout_s: float | None = None) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""
        ...

    def clone(self) -> "Store":
        """Return another connection to the same store, for another thread. From any thread."""
        ...

    def sever(self) -> None:
        """End the connection: a call that is inside it raises StoreError at once, and so do all later ones. From any
        thread.
        """
        ...

    def close(self) -> None:
        """Give everything back. A closed store refuses calls."""
        ...


def check_value(key: str, value: bytes) -> None:
    """Raise UsageError for a value that no store may hold."""
    if not value:
        raise UsageError(
            f"store key {key!r}: the value is empty, which TCPStore takes for no value; write at least a byte"
        )
    if len(value) > MAX_VALUE:
        raise UsageError(
            f"store key {key!r}: the value has {len(value)} bytes, more than {MAX_VALUE}; pass a file, a descriptor or "
            "the address of who has it"
        )


def check_swap(key: str, known: bytes, value: bytes) -> None:
    """Raise UsageError for what `swap` cannot tell apart, and for a value that no store may hold."""
    check_value(key, known)
    check_value(key, value)
    if known == value:
        raise UsageError(f"store key {key!r}: the value is the one that is known; write another, with its writer's id")
