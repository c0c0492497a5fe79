"""Writes one rank's part of a checkpoint: its shard in DCP's format, and the description of its snapshot.

Each byte is read from the snapshot once: hashed (xxh3, of the entry and of the file), checked (the archive's CRC) and
written from where it lies. What another rank writes is read and hashed too, so that replicas can be compared. Files
and their names are durable before the fragment is returned. No torch here.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import xxhash

from everstep.checkpoint.core import items, names
from everstep.checkpoint.core.archive import ALIGNMENT, TensorArchive, value_archive
from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.manifest import Entry, FileFact, Fragment, checksum
from everstep.checkpoint.fileops import Data, FileOps, close, put, sync, write_all

PIECE = 4 << 20
"""Bytes hashed and written at a time, so that the second reading finds them in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which save, and where it goes."""

    save: str
    step: int
    epoch: int
    generation: int
    world_size: int
    folder: str  # the directory being written, with its path


class _Shard:
    """A file that knows its position and its checksum."""

    def __init__(self, files: FileOps, path: str) -> None:
        self._files = files
        self._hash = xxhash.xxh3_64()
        self.path = path
        self.position = 0
        self.fd = files.create(path)

    def write(self, data: Data) -> None:
        write_all(self._files, self.fd, data, self.path)
        self._hash.update(data)
        self.position += len(data)

    def align(self) -> None:
        self.write(bytes(-self.position % ALIGNMENT))

    def fact(self) -> FileFact:
        return FileFact(self.position, self._hash.hexdigest())


def write_shard(
    files: FileOps,
    target: Target,
    snapshot: Layout,
    description: bytes,
    payload: memoryview,
    training: Mapping[str, str],
) -> Fragment:
    """Write what `snapshot.rank` owns of `payload` into `target.folder`; return the durable fragment."""
    rank = snapshot.rank
    tensors = items.tensors(snapshot)
    _make_folder(files, target.folder)
    shard = _Shard(files, os.path.join(target.folder, names.shard(rank)))
    try:
        entries = list(_entries(shard, snapshot, tensors, payload))
        sync(files, shard.fd, shard.path)
    finally:
        close(files, shard.fd, shard.path)
    put(files, os.path.join(target.folder, names.layout(rank)), description)
    files.fsync_dir(target.folder)
    facts = {
        names.shard(rank): shard.fact(),
        names.layout(rank): FileFact(len(description), checksum(description)),
    }
    foreign = [item for item in tensors if item.owner != rank and item.leaf.alias_of is None]
    return Fragment(
        save=target.save, step=target.step, epoch=target.epoch, generation=target.generation,
        world_size=target.world_size, rank=rank, files=facts, entries=tuple(entries),
        needs=tuple(item.id for item in tensors if item.leaf.alias_of is None),
        replicas={item.id: checksum(_elements(item, payload)) for item in foreign}, training=training,
    )  # fmt: skip


def _make_folder(files: FileOps, folder: str) -> None:
    try:
        files.mkdir(folder)
    except FileExistsError:
        return  # another rank's writer was first
    files.fsync_dir(os.path.dirname(folder))


def _elements(item: items.TensorItem, payload: memoryview) -> memoryview:
    return payload[item.leaf.offset : item.leaf.offset + item.leaf.nbytes]


def _entries(
    shard: _Shard, snapshot: Layout, tensors: tuple[items.TensorItem, ...], payload: memoryview
) -> Iterator[Entry]:
    for entry in _own_entries(shard, snapshot, tensors, payload):
        yield entry
        path = items.plain(entry.path) if snapshot.rank == 0 else None
        if path is not None:
            yield replace(entry, name=items.dotted(path), path=path)


def _own_entries(
    shard: _Shard, snapshot: Layout, tensors: tuple[items.TensorItem, ...], payload: memoryview
) -> Iterator[Entry]:
    written: dict[str, Entry] = {}
    for item in tensors:
        if item.owner != snapshot.rank:
            continue
        if item.original not in written:
            written[item.original] = _tensor(shard, item, _elements(item, payload))
            yield written[item.original]
        else:
            yield replace(written[item.original], name=item.name, path=item.path)
    for value in items.values(snapshot):
        if value.owner == snapshot.rank:
            yield _value(shard, value)


def _tensor(shard: _Shard, item: items.TensorItem, elements: memoryview) -> Entry:
    archive = TensorArchive(item.dtype, item.sizes)
    shard.align()
    at = shard.position
    shard.write(archive.head)
    data, entry_hash, crc = shard.position, xxhash.xxh3_64(), 0
    for start in range(0, len(elements), PIECE):
        piece = elements[start : start + PIECE]
        entry_hash.update(piece)
        crc = zlib.crc32(piece, crc)
        shard.write(piece)
    shard.write(archive.tail(crc))
    return Entry(
        name=item.name, path=item.path, file=names.shard(item.owner), at=at, length=shard.position - at, data=data,
        nbytes=len(elements), xxh3=entry_hash.hexdigest(), dtype=item.dtype, shape=item.shape, offsets=item.offsets,
        sizes=item.sizes,
    )  # fmt: skip


def _value(shard: _Shard, item: items.ValueItem) -> Entry:
    content = value_archive(item.value)
    shard.align()
    at = shard.position
    shard.write(content)
    return Entry(
        name=item.name, path=item.path, file=names.shard(item.owner), at=at, length=len(content), data=at,
        nbytes=len(content), xxh3=checksum(content),
    )  # fmt: skip
