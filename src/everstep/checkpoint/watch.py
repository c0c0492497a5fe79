"""Whether everything still stands and lies where a walk found it: what decides if its result may be used again.

A stale part would be a wrong state, saved without a word: so nothing is left to likelihood. Watched is each place (a
dict and its key: the object in it), each dict's size, each list's order, and of each tensor whether it still reads the
same memory in the same way as what will be copied (storage, offset, shape, strides, dtype). Bytes may change; they are
read at every snapshot.

Rule 1: where a place cannot be watched (what holds it is no real dict), all is walked anew each time.
Rule 2: the objects are held, so that none of them can hand its identity or its memory to another.
Rule 3: this runs at every step over every tensor: its loops are C's (`map`), some 0.3 µs a tensor.
"""

from collections.abc import Collection, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_local = attrgetter("_local_tensor")
_placements = attrgetter("_spec.placements")
_dtype = attrgetter("dtype")


class Watch:
    """What one walk has met."""

    def __init__(self) -> None:
        self._sure = True
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._sized: list[Collection[Any]] = []
        self._sizes: list[int] = []
        self._ordered: list[Iterable[Any]] = []
        self._order: list[Any] = []
        self._sets: list[set[Any]] = []
        self._contents: list[set[Any]] = []
        self._sharded: list[DTensor] = []
        self._locals: list[Tensor] = []
        self._spread: list[Any] = []
        self._memory: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []

    def place(self, holder: Any, key: Any, value: Any) -> None:
        """Watch that `value` is what stands at `holder[key]`; for None, see to it that the key is there (`size`)."""
        self._sure = self._sure and isinstance(holder, dict)
        self._holders.append(holder)
        self._keys.append(key)
        self._values.append(value)

    def size(self, container: Collection[Any]) -> None:
        """Watch that nothing is added or taken away."""
        self._sized.append(container)
        self._sizes.append(len(container))

    def order(self, container: Collection[Any]) -> None:
        """Watch that the same objects come in the same order."""
        self.size(container)
        self._ordered.append(container)
        self._order.extend(container)

    def contents(self, held: set[Any]) -> None:
        """Watch that a set of plain values stays equal."""
        self._sets.append(held)
        self._contents.append(set(held))

    def tensor(self, value: Tensor, source: Tensor) -> None:
        """Watch that `source`, a detached alias of `value` or of its local part, is read as that is."""
        if isinstance(value, DTensor):
            self._sharded.append(value)
            self._locals.append(_local(value))
            self._spread.append(_placements(value))
            value = _local(value)
        self._memory.append(value)
        self._sources.append(source)
        self._dtypes.append(value.dtype)

    def holds(self) -> bool:
        """True as long as all is as it was."""
        return (
            self._sure
            and list(map(len, self._sized)) == self._sizes
            and all(map(is_, map(dict.get, self._holders, self._keys), self._values))
            and all(map(is_, chain.from_iterable(self._ordered), self._order))
            and self._sets == self._contents
            and all(map(is_, map(_local, self._sharded), self._locals))
            and list(map(_placements, self._sharded)) == self._spread
            and all(map(is_, map(_dtype, self._memory), self._dtypes))
            and all(map(Tensor.is_set_to, self._memory, self._sources))  # False for a conjugate or negative view
        )
