"""Reads one rank's state from a committed checkpoint by our own manifest: no pickle, every byte checked before use.

A worker's side. `open_for(path, walk)` takes a checkpoint of a world of any size; `open_checkpoint` one of its own.
What `State.bytes_of` returns has just matched its checksum. A wound is a DamagedCheckpoint that names file and reason;
the caller takes the next best copy. What cannot be read now is an UnreachableStorage: nothing older is taken for it.

Rule 1: only the chunks that this rank needs are read, each whole, since a checksum covers a whole chunk; what of it
    another rank needs is hashed and dropped, a few MiB at a time.
Rule 2: `prepare` reads and checks all of it, on several threads (reading and hashing both let go of the interpreter),
    before anything is written into the live objects. It keeps what fits its budget; the rest is read again when it is
    used, and checked again. So host memory holds at most the budget beside one tensor; all ranks of a node together a
    quarter of what they may have, beside one tensor each (CASES CL-18).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol

import xxhash

from everstep.checkpoint import memory
from everstep.checkpoint.core import names
from everstep.checkpoint.core.items import TensorItem, tensors
from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.core.manifest import Entry, Manifest, checksum
from everstep.checkpoint.core.reshard import Digest, Piece, Resharded
from everstep.checkpoint.core.runs import Run, contiguous, runs
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.opening import Opening
from everstep.checkpoint.unreachable import failure
from everstep.errors import CheckpointError, DamagedCheckpoint

PIECE = 4 << 20
"""Bytes read and hashed at a time, so that hashing finds them in the processor's cache."""

THREADS = 8


class Taker(Protocol):
    """Whose state it will be (`walk.StateWalk`)."""

    rank: int
    world_size: int

    def divided_as(self, layout: Layout) -> bool:
        """True where this rank's tensors are the rectangles that `layout` describes."""
        ...

    def reshard(self, saved: Sequence[Layout], digest: Digest) -> Resharded:
        """Say what this rank takes of a state that a world of another size saved."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk of the checkpoint, and what of it goes where in a leaf. `piece` None: all of it is the leaf."""

    entry: Entry
    piece: Piece | None = None


@dataclass
class State:
    """One rank's saved state. A context manager: its files are closed at the end."""

    path: str
    manifest: Manifest
    layout: Layout
    _files: "_Files"
    _parts: Callable[[str], tuple[_Part, ...]]
    refused: Mapping[str, str] = field(default_factory=dict[str, str])  # see `Resharded`
    told: tuple[str, ...] = ()
    _kept: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def __post_init__(self) -> None:
        self._leaves = {leaf.path: leaf for leaf in self.layout.leaves()}

    @property
    def step(self) -> int:
        """Last step done in this state."""
        return self.manifest.step

    def bytes_of(self, leaf: Leaf) -> memoryview:
        """Return the bytes of a leaf, verified: what a walk's `restore` asks for."""
        return memoryview(self.read(leaf.path))

    def read(self, path: str) -> bytearray:
        """Return the bytes of the leaf with that path, verified; an alias gives its original's."""
        original = self._leaves[path].alias_of or path
        kept = self._kept.get(original)
        return self._assemble(self._leaves[original]) if kept is None else kept

    def prepare(self, budget_bytes: int | None = None, threads: int | None = None) -> int:
        """Read and check everything once; return the bytes of this rank's state. Raises DamagedCheckpoint.

        At most `budget_bytes` are kept (left out: this rank's share of a quarter of what the machine, and the control
        group, have available).
        """
        budget = memory.read().free // 4 // self.layout.world_size if budget_bytes is None else budget_bytes
        wanted = [leaf for leaf in self._leaves.values() if leaf.alias_of is None and leaf.path not in self.refused]
        jobs: list[Callable[[], None]] = []
        kept, size = list[Leaf](), 0
        for leaf in wanted:
            budget -= leaf.nbytes
            if budget < 0:
                jobs += [partial(self._files.check, part.entry) for part in self._parts(leaf.path)]
                continue
            if kept and size + leaf.nbytes > PIECE:
                jobs.append(partial(self._keep, kept))
                kept, size = [], 0
            kept.append(leaf)
            size += leaf.nbytes
        jobs.append(partial(self._keep, kept))
        count = min(threads or THREADS, len(os.sched_getaffinity(0)), len(jobs))
        if count < 2:  # noqa: PLR2004 - one thread is this one
            for job in jobs:
                job()
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="everstep-load") as pool:
                under_way = [pool.submit(job) for job in jobs]
                try:
                    for done in under_way:
                        done.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)  # one wound is enough: the next copy is waited for
                    raise
        return sum(leaf.nbytes for leaf in wanted)

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
        """Close its files and let go of what is kept; twice does no harm."""
        self._files.close()
        self._kept.clear()

    def _keep(self, leaves: Sequence[Leaf]) -> None:
        """One thread's job: a large leaf, or small ones, since to hand one over costs more than to read it."""
        for leaf in leaves:
            self._kept[leaf.path] = self._assemble(leaf)

    def _assemble(self, leaf: Leaf) -> bytearray:
        made = bytearray(leaf.nbytes)
        with memoryview(made) as view:
            for part in self._parts(leaf.path):
                self._files.read(part, leaf, view)
        return made


class _Files:
    """The data files of one checkpoint, opened as they are needed. Any thread."""

    def __init__(self, path: str, through: Opening) -> None:
        self.path = path
        self._source = through(path)

    def where(self, name: str) -> str:
        return os.path.join(self.path, name)

    def close(self) -> None:
        self._source.close()

    def check(self, entry: Entry) -> None:
        """Read a chunk and drop it."""
        self._verified(entry, Run(0, 0, 0), memoryview(bytearray()))

    def read(self, part: _Part, leaf: Leaf, into: memoryview) -> None:
        """Read a chunk, check it, and put what is wanted of it in its place."""
        entry, piece = part.entry, part.piece
        whole = piece is None or piece.sizes == piece.source.shape == leaf.shape
        if whole and entry.nbytes != leaf.nbytes:
            raise DamagedCheckpoint(
                f"{self.where(names.MANIFEST)}: {entry.name} has {entry.nbytes} bytes where its description has "
                f"{leaf.nbytes}"
            )
        if piece is None or whole:
            self._verified(entry, Run(0, 0, entry.nbytes), into)
            return
        item = piece.source.nbytes // max(1, _count(piece.source.shape))
        one = contiguous(piece.source.shape, piece.start, leaf.shape, piece.into, piece.sizes, item)
        if one is not None:
            self._verified(entry, one, into)
            return
        chunk = bytearray(entry.nbytes)
        with memoryview(chunk) as view:
            self._verified(entry, Run(0, 0, entry.nbytes), view)
            for run in runs(piece.source.shape, piece.start, leaf.shape, piece.into, piece.sizes, item):
                into[run.to : run.to + run.count] = view[run.start : run.start + run.count]

    def _verified(self, entry: Entry, wanted: Run, into: memoryview) -> None:
        """Read and hash a whole chunk; the bytes of `wanted` go into `into`, the others nowhere."""
        found, scratch = xxhash.xxh3_64(), memoryview(bytearray(min(PIECE, entry.nbytes - wanted.count)))
        end = wanted.start + wanted.count
        for start, stop, keep in ((0, wanted.start, False), (wanted.start, end, True), (end, entry.nbytes, False)):
            for at in range(start, stop, PIECE):
                size = min(PIECE, stop - at)
                to = wanted.to + at - wanted.start
                piece = into[to : to + size] if keep else scratch[:size]
                self._fill(entry, piece, at)
                found.update(piece)
        if found.hexdigest() != entry.xxh3:
            raise DamagedCheckpoint(
                f"{self.where(entry.file)}: {entry.name} has checksum {found.hexdigest()}, not "
                f"{entry.xxh3}: its bytes were changed"
            )

    def _fill(self, entry: Entry, view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            count = self._pread(entry, view[done:], entry.data + at + done)
            if count == 0:
                raise DamagedCheckpoint(
                    f"{self.where(entry.file)}: ends inside {entry.name}, {entry.nbytes - at - done} bytes early: cut"
                )
            done += count

    def _pread(self, entry: Entry, into: memoryview, offset: int) -> int:
        try:
            return self._source.read_into(entry.file, into, offset)
        except OSError as error:
            raise failure(self.where(entry.file), error) from error


def open_for(path: str, taker: Taker, through: Opening = opening.reading) -> State:
    """Open the checkpoint at `path` for a rank of any world. DamagedCheckpoint names the wound.

    `through`: who reads it; another process, where nobody may wait for the storage; one who tries again (`retried`).
    """
    manifest = opening.read_manifest(path, through)
    if manifest.world_size == taker.world_size:
        state = _open(path, manifest, taker.rank, through)
        if taker.divided_as(state.layout):
            return state
        state.close()
    return _open_resharded(path, manifest, taker, through)


def open_checkpoint(path: str, rank: int, world_size: int) -> State:
    """Open the checkpoint at `path` for one rank. DamagedCheckpoint names the wound; CheckpointError another world."""
    manifest = opening.read_manifest(path)
    if manifest.world_size != world_size:
        raise CheckpointError(
            f"{path} was saved by {manifest.world_size} ranks and this world has {world_size}: what a rank takes of it "
            "depends on the objects that it is for. Give them: open_for(path, StateWalk(state, rank=…, world_size=…))."
        )
    return _open(path, manifest, rank)


def saved_layouts(path: str, manifest: Manifest, through: Opening = opening.reading) -> list[Layout]:
    """Read the descriptions of all ranks that saved, in order. DamagedCheckpoint names the wound."""
    return [_layout(path, manifest, rank, through) for rank in range(manifest.world_size)]


def _open(path: str, manifest: Manifest, rank: int, through: Opening = opening.reading) -> State:
    layout = _layout(path, manifest, rank, through)
    found = _Lookup(path, manifest, {rank: layout})
    return State(path, manifest, layout, _Files(path, through), lambda leaf: (_Part(found.entry(rank, leaf)),))


def _open_resharded(path: str, manifest: Manifest, taker: Taker, through: Opening) -> State:
    saved = saved_layouts(path, manifest, through)
    found = _Lookup(path, manifest, dict(enumerate(saved)))
    made = taker.reshard(saved, lambda rank, leaf: found.entry(rank, leaf.path).xxh3)

    def parts(leaf: str) -> tuple[_Part, ...]:
        pieces = made.pieces[leaf]
        if not pieces and leaf in made.refused:
            raise CheckpointError(f"{path}: {made.refused[leaf]}")
        return tuple(
            _Part(found.entry(piece.rank, piece.source.path), piece) for piece in pieces if piece.source.nbytes
        )

    return State(path, manifest, made.layout, _Files(path, through), parts, made.refused, made.told)


class _Lookup:
    """From a rank and the path of a leaf of its snapshot to the chunk that holds it."""

    def __init__(self, path: str, manifest: Manifest, layouts: Mapping[int, Layout]) -> None:
        self._path = path
        self._entries = {entry.id: entry for entry in _trusted(path, manifest)}
        self._layouts = layouts
        self._items: dict[int, Mapping[str, TensorItem]] = {}

    def entry(self, rank: int, leaf: str) -> Entry:
        if rank not in self._items:
            self._items[rank] = {item.leaf.path: item for item in tensors(self._layouts[rank])}
        items = self._items[rank]
        item = items[items[leaf].original]
        entry = self._entries.get(item.id)
        if entry is None:
            raise DamagedCheckpoint(
                f"{os.path.join(self._path, names.MANIFEST)}: has no entry {item.id}, which rank {rank} needs"
            )
        if (entry.nbytes, entry.dtype, entry.sizes) != (item.leaf.nbytes, item.dtype, item.sizes):
            raise DamagedCheckpoint(
                f"{os.path.join(self._path, names.MANIFEST)}: {entry.id} is {entry.dtype}{list(entry.sizes)} where "
                f"rank {rank} saved {item.dtype}{list(item.sizes)}"
            )
        return entry


def _count(shape: Sequence[int]) -> int:
    made = 1
    for size in shape:
        made *= size
    return made


def _layout(path: str, manifest: Manifest, rank: int, through: Opening) -> Layout:
    layout = Layout.from_json(_description(path, manifest, rank, through))
    if (layout.rank, layout.world_size) != (rank, manifest.world_size):
        raise DamagedCheckpoint(f"{path}/{names.layout(rank)}: describes rank {layout.rank} of {layout.world_size}")
    return layout


def _description(path: str, manifest: Manifest, rank: int, through: Opening) -> bytes:
    where, fact = os.path.join(path, names.layout(rank)), manifest.files.get(names.layout(rank))
    if fact is None:
        raise DamagedCheckpoint(f"{path}/{names.MANIFEST}: names no description of rank {rank}")
    content = opening.content(path, names.layout(rank), fact.bytes, through)
    if (len(content), checksum(content)) != (fact.bytes, fact.xxh3):
        raise DamagedCheckpoint(f"{where}: does not match its checksum: cut or changed")
    return content


def _trusted(path: str, manifest: Manifest) -> Iterator[Entry]:
    """Entries that name files of this checkpoint; a name with a path in it never leaves the directory."""
    for entry in manifest.entries:
        if entry.file not in manifest.files or os.path.basename(entry.file) != entry.file:
            raise DamagedCheckpoint(f"{path}/{names.MANIFEST}: {entry.name} lies in {entry.file!r}, not a file of it")
        yield entry
