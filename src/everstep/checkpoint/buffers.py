"""A rank's snapshot buffers as its worker sees them: memfds of the agent, mapped."""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.core.segment import Header, parse
from everstep.checkpoint.staging import Copied, Pair, Scratch, grouped, page_lock, page_unlock
from everstep.checkpoint.tensors import Part, view

_Grouped = tuple[tuple[Part, ...], list[Copied], list[Copied]]


class Buffer:
    """One mapped buffer. Every page is touched when it is mapped, so no step pays for it."""

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.number = number
        self.size = size
        self.sequence = 0  # of the snapshot in it, sealed or being copied; 0: void
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes = memoryview(self._map)
        self.raw = torch.frombuffer(self._map, dtype=torch.uint8)
        self._locked = False
        self._groups: _Grouped | None = None
        self._others: list[_Grouped] = []  # of the parts that may change, one after the other

    def header(self) -> Header | str:
        """Return what the buffer says of itself, or why it says nothing."""
        return parse(self.bytes)

    def layout(self, header: Header) -> Layout:
        """Return the description of the sealed snapshot; DamagedCheckpoint where it cannot be read."""
        return Layout.from_json(bytes(self.bytes[header.meta_offset : header.meta_offset + header.meta_bytes]))

    def payload(self, header: Header, leaf: Leaf) -> memoryview:
        """Return the bytes of a leaf."""
        start = header.payload_offset + leaf.offset
        return self.bytes[start : start + leaf.nbytes]

    def groups(
        self, payload_at: int, stable: Sequence[Part], changing: Iterable[Part], scratch: Scratch | None = None
    ) -> tuple[list[Copied], list[Copied]]:
        """Return what is to be copied where: (early, late). Views are made once for the stable parts, and for others.

        They are used again for the same leaves, which say where in the payload, and the same sources.
        """
        known = self._groups
        if known is None or not _alike(known[0], stable):
            known = self._groups = (tuple(stable), *self._make(payload_at, stable, scratch))
        before = self._others
        self._others = []
        for n, part in enumerate(part for part in changing if part.sources):
            again = n < len(before) and _alike(before[n][0], (part,))
            self._others.append(before[n] if again else ((part,), *self._make(payload_at, (part,), scratch)))
        if not self._others:
            return known[1], known[2]
        made = known, *self._others
        return [group for _, early, _ in made for group in early], [group for _, _, late in made for group in late]

    def page_lock(self) -> None:
        """Make it fit for fast copies from a device; once for as long as it is mapped."""
        self._locked = self._locked or page_lock(self.raw)

    def drop(self) -> None:
        """No longer needed; the memory is unmapped with the last view of it."""
        self.forget()
        if self._locked:
            page_unlock(self.raw)
        self._locked = False

    def forget(self) -> None:
        """Drop views and sources: the model that they belong to is going away."""
        self._groups, self._others = None, []

    def _make(
        self, payload_at: int, parts: Iterable[Part], scratch: Scratch | None
    ) -> tuple[list[Copied], list[Copied]]:
        early, late = list[Pair](), list[Pair]()
        for part in parts:
            leaves = (leaf for leaf in part.section.leaves if leaf.alias_of is None)
            for n, (leaf, source) in enumerate(zip(leaves, part.sources, strict=True)):
                if leaf.nbytes:
                    start = payload_at + leaf.offset
                    pair = (view(self.raw[start : start + leaf.nbytes], leaf), source)
                    (late if n in part.late else early).append(pair)
        return grouped(early, self.raw, scratch), grouped(late, self.raw, scratch)


def _alike(known: Sequence[Part], parts: Sequence[Part]) -> bool:
    return len(known) == len(parts) and all(
        a.section.leaves is b.section.leaves and a.sources is b.sources and a.late is b.late
        for a, b in zip(known, parts, strict=True)
    )


class BufferSet:
    """The buffers that were allocated together, all of one size."""

    def __init__(self, number: int, size: int, buffers: Mapping[int, int]) -> None:
        self.number = number
        self.size = size
        self.buffers = {n: Buffer(n, fd, size) for n, fd in buffers.items()}

    @classmethod
    def from_message(cls, body: Mapping[str, Any], fds: Sequence[int]) -> "BufferSet":
        """Map what the agent sent; the descriptors are closed, the mappings stay."""
        try:
            return cls(body["set"], body["bytes"], dict(zip(body["buffers"], fds, strict=True)))
        finally:
            for fd in fds:
                os.close(fd)

    def page_lock(self) -> None:
        """See `Buffer.page_lock`."""
        for buffer in self.buffers.values():
            buffer.page_lock()

    def drop(self) -> None:
        """See `Buffer.drop`."""
        for buffer in self.buffers.values():
            buffer.drop()

    def forget(self) -> None:
        """See `Buffer.forget`."""
        for buffer in self.buffers.values():
            buffer.forget()

    def reread(self) -> None:
        """Learn from the headers what is sealed; others may have voided some."""
        for buffer in self.buffers.values():
            found = buffer.header()
            buffer.sequence = found.sequence if isinstance(found, Header) else 0
            buffer.forget()
