"""A mapping that grows without a copy of what it has: what thousands of arrivals are kept in.

Rule 1: it is a value. What one holds never changes, whatever is added to it elsewhere.
Rule 2: all versions of one share their entries, in the order in which they came; each sees the first so many of them.
        Only the newest has nothing behind it, and adds to what is shared. An older one is copied before it grows.
Rule 3: a key's first value stands.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")


class Growing(Mapping[K, V]):
    """See the rules above. One thread at a time grows it."""

    __slots__ = ("_entries", "_size")

    def __init__(self, entries: Iterable[tuple[K, V]] = ()) -> None:
        self._entries: dict[K, tuple[int, V]] = {}  # with its place: what lies behind `_size` is not ours
        self._size = self._add(entries)

    def plus(self, more: Iterable[tuple[K, V]]) -> "Growing[K, V]":
        """Return the mapping that has these entries too. It costs what it adds."""
        newest = len(self._entries) == self._size
        grown = Growing[K, V](() if newest else self.items())
        if newest:
            grown._entries = self._entries
        grown._size = grown._add(more)
        return grown

    def _add(self, more: Iterable[tuple[K, V]]) -> int:
        for key, value in more:
            self._entries.setdefault(key, (len(self._entries), value))
        return len(self._entries)

    def __getitem__(self, key: K) -> V:
        place, value = self._entries[key]
        if place >= self._size:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        found = self._entries.get(cast("K", key))
        return found is not None and found[0] < self._size

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(islice(self._entries, self._size)))

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Growing({dict(self)})"
