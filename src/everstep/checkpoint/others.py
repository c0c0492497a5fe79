"""The snapshots of all ranks of another world, in the memory of this node, for one rank of this world to read.

The agent hands out the descriptors and keeps the buffers as they are meanwhile (`shelf` rule 6). They are mapped for
reading alone. Trusted by their seals, as every snapshot in memory; what is taken out of them is a copy.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.core.manifest import checksum
from everstep.checkpoint.core.reshard import Piece, Resharded
from everstep.checkpoint.core.runs import runs
from everstep.checkpoint.core.segment import Header, parse, wound
from everstep.errors import DamagedCheckpoint


class Unreadable(DamagedCheckpoint):
    """One of the buffers is not what it should be."""

    def __init__(self, rank: int, buffer: int, why: str) -> None:
        super().__init__(f"buffer {buffer} of rank {rank}: {why}")
        self.rank, self.buffer, self.why = rank, buffer, why


@dataclass(slots=True)
class _Snapshot:
    view: memoryview
    header: Header
    layout: Layout
    places: dict[str, Leaf]


class Others:
    """Opened buffers, one a rank of the world that saved. `fds` are closed; the mappings last until `close`."""

    def __init__(self, step: int, ranks: Sequence[int], buffers: Sequence[int], fds: Sequence[int]) -> None:
        try:
            self._maps = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in fds]
        finally:
            for fd in fds:
                os.close(fd)
        self._buffers = list(buffers)
        if list(ranks) != list(range(len(self._maps))):
            raise Unreadable(min(ranks, default=0), min(buffers, default=0), f"the agent sent those of ranks {ranks}")
        self._snapshots = [self._read(rank, step) for rank in ranks]
        self._made: Resharded | None = None

    @property
    def layouts(self) -> list[Layout]:
        """Descriptions of all ranks that saved, in order."""
        return [snapshot.layout for snapshot in self._snapshots]

    def digest(self, rank: int, leaf: Leaf) -> str:
        """See `reshard.Digest`."""
        return checksum(self._bytes(rank, leaf))

    def take(self, made: Resharded) -> None:
        """Say what this rank takes, before `bytes_of` is asked."""
        self._made = made

    def bytes_of(self, leaf: Leaf) -> bytearray:
        """Return a copy of the bytes of a leaf of what is taken."""
        assert self._made is not None, "take() comes first"
        made = bytearray(leaf.nbytes)
        for piece in self._made.pieces[leaf.alias_of or leaf.path]:
            self._copy(piece, leaf, made)
        return made

    def check(self) -> None:
        """Raise Unreadable where a buffer is not any more what it was when it was opened."""
        for rank, snapshot in enumerate(self._snapshots):
            if parse(snapshot.view) != snapshot.header:
                raise Unreadable(rank, self._buffers[rank], "was written while it was read")

    def close(self) -> None:
        """Unmap."""
        for snapshot in self._snapshots:
            snapshot.view.release()
        self._snapshots = []
        for each in self._maps:
            each.close()
        self._maps = []

    def _read(self, rank: int, step: int) -> _Snapshot:
        view = memoryview(self._maps[rank])
        header = parse(view)
        if isinstance(header, str):
            raise Unreadable(rank, self._buffers[rank], header)
        if (header.rank, header.step, header.world_size) != (rank, step, len(self._maps)):
            raise Unreadable(
                rank, self._buffers[rank],
                f"holds step {header.step} of rank {header.rank} of {header.world_size}, not step {step}",
            )  # fmt: skip
        if why := wound(view, header):
            raise Unreadable(rank, self._buffers[rank], why)
        try:
            layout = Layout.from_json(bytes(view[header.meta_offset : header.meta_offset + header.meta_bytes]))
        except DamagedCheckpoint as error:
            raise Unreadable(rank, self._buffers[rank], str(error)) from error
        return _Snapshot(view, header, layout, {leaf.path: leaf for leaf in layout.leaves()})

    def _bytes(self, rank: int, leaf: Leaf) -> memoryview:
        snapshot = self._snapshots[rank]
        place = snapshot.places[leaf.path]
        start = snapshot.header.payload_offset + place.offset
        return snapshot.view[start : start + place.nbytes]

    def _copy(self, piece: Piece, leaf: Leaf, made: bytearray) -> None:
        content = self._bytes(piece.rank, piece.source)
        if piece.sizes == piece.source.shape == leaf.shape:
            made[:] = content
            return
        count = 1
        for size in piece.source.shape:
            count *= size
        item = piece.source.nbytes // max(1, count)
        for run in runs(piece.source.shape, piece.start, leaf.shape, piece.into, piece.sizes, item):
            made[run.to : run.to + run.count] = content[run.start : run.start + run.count]
