"""The files of a DCP checkpoint while they are written: beside their final name, and under it only when they are whole.

    .NAME.<token>.tmp/  one for each rank of a save       holds .owner, locked while its process lives
        __<rank>_<n>.distcp                               DCP's format, a checksum for each entry and each file
    NAME/               what the coordinator makes of them: files moved together, .metadata, manifest, fsync, rename

Rule 1: nothing of a save is visible under NAME before all of it is durable; what had the name stays until then.
Rule 2: no two saves share a folder, so nothing that an aborted one left can end the next (CS-39), and ranks need agree
about no name.
Rule 3: what a dead process left behind is swept by the next save to the same name; what a living one writes is not, and
what is not ours never.
"""

import contextlib
import fcntl
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from everstep.checkpoint.core import names
from everstep.checkpoint.core.archive import ALIGNMENT, STORAGES, UNTYPED, TensorArchive
from everstep.checkpoint.core.manifest import Entry, FileFact, Manifest, checksum
from everstep.checkpoint.fileops import Data, FileOps, close, put, sync, write_all
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError

OWNER = ".owner"
PIECE = 4 << 20
VISIBLE_S = 10.0
"""How long a file that another rank has written may take to be seen here (NFS caches names)."""
_OURS = re.compile(r"(__\d+_\d+\.distcp|[\w.]*__\d+_\d+\.distcp|\.metadata|manifest\.json|\.owner(\.new)?|\.results)\Z")


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor's chunk, or a value, that is to be written: its bytes as they lie in memory."""

    dtype: str | None  # torch's name; None: a value, already serialized
    sizes: tuple[int, ...]
    data: Data

    @property
    def raw(self) -> bool:
        """True where it is written as elements that are read again without unpickling."""
        return self.dtype in STORAGES or self.dtype in UNTYPED


@dataclass(frozen=True, slots=True)
class Written:
    """Where an item lies, and how it must read."""

    folder: str
    file: str
    at: int
    length: int
    data: int
    nbytes: int
    xxh3: str
    dtype: str | None
    sizes: tuple[int, ...]
    fact: FileFact  # of the file


class Staging:
    """The folder of one rank's part of one save."""

    def __init__(self, target: str, files: FileOps) -> None:
        parent, name = os.path.split(os.path.realpath(target))  # of a link, what it leads to is replaced
        os.makedirs(parent, exist_ok=True)
        for leftover in _dead(parent, name):
            discard(files, leftover)
        self.token = secrets.token_hex(8)
        self.folder = os.path.join(parent, f".{name}.{self.token}.tmp")
        self._files = files
        files.mkdir(self.folder)
        path = os.path.join(self.folder, OWNER)
        self._lock = files.create(path + ".new")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, str(os.getpid()).encode())
        files.rename(path + ".new", path)  # locked before it can be seen: whoever looks may lock it for a moment

    def published(self) -> None:
        """It has its final name, or its files were moved: nothing is to be removed."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard(self) -> None:
        """Remove what is left of it; twice does no harm."""
        if self._lock >= 0:
            discard(self._files, self.folder)
        self.published()


def _dead(parent: str, name: str) -> Iterator[str]:
    """Return the folders of saves to `name` whose process has ended."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp\Z")
    for found in os.listdir(parent):
        if pattern.match(found) and _is_dead(os.path.join(parent, found, OWNER)):
            yield os.path.join(parent, found)


def _is_dead(owner: str) -> bool:
    try:
        fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # just begun, or just gone
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def discard(files: FileOps, folder: str) -> None:
    """Remove our files of a folder, and it, if it holds nothing else. Says nothing of what cannot be removed."""
    with contextlib.suppress(OSError):
        for name in sorted(files.listdir(folder), key=lambda n: n == OWNER):
            if _OURS.match(name):
                files.unlink(os.path.join(folder, name))
        files.rmdir(folder)


def write_file(files: FileOps, folder: str, name: str, items: Iterable[Item]) -> list[Written]:
    """Write one durable file; return where each item lies, in their order. Raises OSError with the file's name."""
    path = os.path.join(folder, name)
    shard = _Shard(files, path)
    try:
        places = [_place(shard, item) for item in items]
        sync(files, shard.fd, path)
    finally:
        close(files, shard.fd, path)
    fact = FileFact(shard.position, shard.hash.hexdigest())
    return [
        Written(folder, name, at, length, data, nbytes, digest, item, sizes, fact)
        for at, length, data, nbytes, digest, item, sizes in places
    ]


class _Shard:
    """A file that knows its position and its checksum."""

    def __init__(self, files: FileOps, path: str) -> None:
        self._files, self._path = files, path
        self.hash, self.position = xxhash.xxh3_64(), 0
        self.fd = files.create(path)

    def write(self, data: Data) -> None:
        write_all(self._files, self.fd, data, self._path)
        self.hash.update(data)
        self.position += len(data)


_Place = tuple[int, int, int, int, str, str | None, tuple[int, ...]]


def _place(shard: _Shard, item: Item) -> _Place:
    shard.write(bytes(-shard.position % ALIGNMENT))
    at, entry_hash, crc = shard.position, xxhash.xxh3_64(), 0
    archive = TensorArchive(item.dtype or "", item.sizes) if item.raw else None
    if archive is not None:
        shard.write(archive.head)
    data = shard.position
    with memoryview(item.data) as view:
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            entry_hash.update(piece)
            crc = zlib.crc32(piece, crc) if archive is not None else 0
            shard.write(piece)
        nbytes = len(view)
    if archive is not None:
        shard.write(archive.tail(crc))
    return at, shard.position - at, data, nbytes, entry_hash.hexdigest(), item.dtype, item.sizes


def gather(files: FileOps, staging: Staging, results: Iterable[Written], clock: Clock = SYSTEM) -> dict[str, FileFact]:
    """Move every rank's files into this staging folder; return what each must be.

    Raises CheckpointError for one that is not there, or not as it was written.
    """
    facts: dict[str, FileFact] = {}
    folders: set[str] = set()
    for found in results:
        if facts.setdefault(found.file, found.fact) != found.fact:
            raise CheckpointError(f"two ranks have written {found.file}: each rank needs a number of its own")
        path = os.path.join(found.folder, found.file)
        mine = os.path.join(staging.folder, found.file)
        if found.folder == staging.folder or os.path.exists(mine):
            continue
        _seen(path, found.fact.bytes, clock)
        files.rename(path, mine)
        folders.add(found.folder)
    for name, fact in facts.items():
        _seen(os.path.join(staging.folder, name), fact.bytes, clock)
    for folder in folders:
        discard(files, folder)
    return facts


def _seen(path: str, size: int, clock: Clock) -> None:
    until = clock.now() + VISIBLE_S
    while not os.path.exists(path) and clock.now() < until:
        clock.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(path))  # NFS looks again
    found = os.stat(path).st_size if os.path.exists(path) else None
    if found != size:
        said = "is not there" if found is None else f"has {found} bytes, not {size}"
        raise CheckpointError(
            f"{path}, which another rank has written, {said}, as the coordinator sees it. All ranks of a save must "
            "write to one shared directory; nothing was published."
        )


def publish(files: FileOps, staging: Staging, target: str, manifest: Manifest, metadata: bytes) -> None:
    """Make the folder, whose shards are durable and all there, the checkpoint `target`."""
    target = os.path.realpath(target)
    manifest = manifest.with_file(names.METADATA, FileFact(len(metadata), checksum(metadata)))
    put(files, os.path.join(staging.folder, names.METADATA), metadata)
    put(files, os.path.join(staging.folder, names.MANIFEST), manifest.to_bytes())
    files.unlink(os.path.join(staging.folder, OWNER))
    files.fsync_dir(staging.folder)
    replaced = os.path.lexists(target)
    if not replaced:
        files.rename(staging.folder, target)
    elif os.path.isdir(target) and not os.path.islink(target):
        files.exchange(staging.folder, target)
    else:
        raise CheckpointError(f"{target} is there and is no directory; move it away, or save to another name")
    staging.published()
    files.fsync_dir(os.path.dirname(target))
    if replaced:  # not before the new one has the name for good
        _keep_foreign(files, staging.folder, target)


def _keep_foreign(files: FileOps, old: str, target: str) -> None:
    """What others have put beside the former checkpoint stands beside the new one; the former goes."""
    for name in files.listdir(old):
        if not _OURS.match(name):
            files.rename(os.path.join(old, name), os.path.join(target, name))
    discard(files, old)


def holds_checkpoint(target: str) -> bool:
    """True where something that a reader takes for a checkpoint has the name."""
    return os.path.exists(os.path.join(target, names.METADATA))


@dataclass(frozen=True, slots=True)
class Described:
    """What a manifest says of one item beside where it lies."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    written: Written


def manifest_of(
    target: str, token: str, world_size: int, facts: Mapping[str, FileFact], items: Sequence[Described]
) -> Manifest:
    """Return the manifest of a save."""
    entries = tuple(sorted((_entry(item) for item in items), key=lambda e: (e.name, e.offsets)))
    step = names.step_of(os.path.basename(os.path.abspath(target))) or 0
    return Manifest(
        step=step, epoch=0, generation=0, world_size=world_size, save=token, files=dict(facts), entries=entries,
        training={},
    )  # fmt: skip


def _entry(item: Described) -> Entry:
    at = item.written
    return Entry(
        name=item.name, path=(item.name,), file=at.file, at=at.at, length=at.length, data=at.data, nbytes=at.nbytes,
        xxh3=at.xxh3, dtype=at.dtype, shape=item.shape, offsets=item.offsets, sizes=at.sizes,
    )  # fmt: skip
