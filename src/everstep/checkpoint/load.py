"""Reads one rank's state from a committed checkpoint by our own manifest: no pickle, every byte checked as it is read.

A worker's side. `open_checkpoint` reads manifest and description, `State.bytes_of` one leaf at a time: what it returns
has just matched its checksum. A wound is a DamagedCheckpoint that names file and reason; nothing of it has been handed
on, and the caller takes the next best copy.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from everstep.checkpoint.core import names
from everstep.checkpoint.core.items import TensorItem, tensors
from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.core.manifest import Entry, Manifest, checksum
from everstep.checkpoint.publish import read_manifest
from everstep.errors import CheckpointError, DamagedCheckpoint


@dataclass
class State:
    """One rank's saved state. A context manager: its files are closed at the end."""

    path: str
    manifest: Manifest
    layout: Layout
    _items: Mapping[str, TensorItem]
    _entries: Mapping[str, Entry]
    _fds: dict[str, int]

    @property
    def step(self) -> int:
        """Last step done in this state."""
        return self.manifest.step

    def bytes_of(self, leaf: Leaf) -> memoryview:
        """Return the bytes of a leaf, verified: what a walk's `restore` asks for."""
        return memoryview(self.read(leaf.path))

    def read(self, path: str) -> bytearray:
        """Return the bytes of the leaf with that path, verified; an alias gives its original's."""
        item = self._items[self._items[path].original]
        entry = self._entries.get(item.id)
        if entry is None:
            raise DamagedCheckpoint(
                f"{self._where(names.MANIFEST)}: has no entry {item.id}, which rank {self.layout.rank} needs"
            )
        return self._verified(entry)

    def payload(self) -> bytearray:
        """Return all leaves where the layout says that they lie: what a snapshot's payload would be."""
        made = bytearray(self.layout.payload_bytes)
        for leaf in self.layout.leaves():
            if leaf.alias_of is None:
                made[leaf.offset : leaf.offset + leaf.nbytes] = self.read(leaf.path)
        return made

    def __enter__(self) -> "State":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its files; twice does no harm."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _verified(self, entry: Entry) -> bytearray:
        content = bytearray(entry.nbytes)
        with memoryview(content) as view:
            done = 0
            while done < entry.nbytes:
                count = self._pread(entry, view[done:], entry.data + done)
                if count == 0:
                    raise DamagedCheckpoint(
                        f"{self._where(entry.file)}: ends inside {entry.name}, {entry.nbytes - done} bytes early: cut"
                    )
                done += count
            found = checksum(view)
        if found != entry.xxh3:
            raise DamagedCheckpoint(
                f"{self._where(entry.file)}: {entry.name} has checksum {found}, not "
                f"{entry.xxh3}: its bytes were changed"
            )
        return content

    def _pread(self, entry: Entry, into: memoryview, offset: int) -> int:
        try:
            if entry.file not in self._fds:
                self._fds[entry.file] = os.open(self._where(entry.file), os.O_RDONLY | os.O_CLOEXEC)
            return os.preadv(self._fds[entry.file], [into], offset)
        except OSError as error:
            raise DamagedCheckpoint(f"{self._where(entry.file)}: {error.strerror}") from error

    def _where(self, name: str) -> str:
        return os.path.join(self.path, name)


def open_checkpoint(path: str, rank: int, world_size: int) -> State:
    """Open the checkpoint at `path` for one rank. DamagedCheckpoint names the wound; CheckpointError another world."""
    manifest = read_manifest(path)
    if manifest.world_size != world_size:
        raise CheckpointError(
            f"{path} was saved by {manifest.world_size} ranks and this world has {world_size}. Everstep restores to "
            f"the same number; start with --nproc-per-node {manifest.world_size}, or load it with "
            "torch.distributed.checkpoint.load, which reshards (docs/checkpoints.md)."
        )
    layout = Layout.from_json(_description(path, manifest, rank))
    if (layout.rank, layout.world_size) != (rank, world_size):
        raise DamagedCheckpoint(f"{path}/{names.layout(rank)}: describes rank {layout.rank} of {layout.world_size}")
    items = {item.leaf.path: item for item in tensors(layout)}
    return State(path, manifest, layout, items, {entry.id: entry for entry in _trusted(path, manifest)}, {})


def _description(path: str, manifest: Manifest, rank: int) -> bytes:
    where, fact = os.path.join(path, names.layout(rank)), manifest.files.get(names.layout(rank))
    if fact is None:
        raise DamagedCheckpoint(f"{path}/{names.MANIFEST}: names no description of rank {rank}")
    try:
        content = Path(where).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{where}: {error.strerror}") from error
    if (len(content), checksum(content)) != (fact.bytes, fact.xxh3):
        raise DamagedCheckpoint(f"{where}: does not match its checksum: cut or changed")
    return content


def _trusted(path: str, manifest: Manifest) -> Iterator[Entry]:
    """Entries that name files of this checkpoint; a name with a path in it never leaves the directory."""
    for entry in manifest.entries:
        if entry.file not in manifest.files or os.path.basename(entry.file) != entry.file:
            raise DamagedCheckpoint(f"{path}/{names.MANIFEST}: {entry.name} lies in {entry.file!r}, not a file of it")
        yield entry
