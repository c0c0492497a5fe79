"""A storage writer and reader for `torch.distributed.checkpoint`: whole checkpoints or none, and every byte checked.

    dcp.save(state, storage_writer=FileSystemWriter("ckpt/step-100"))
    dcp.async_save(state, storage_writer=FileSystemWriter("ckpt/step-100"))
    dcp.load(state, storage_reader=FileSystemReader("ckpt/step-100"))

They have torch's names and take torch's arguments, so that an import is all that changes. What is written is DCP's own
format: torch's reader reads it, and `everstep checkpoint verify ckpt` too. dcp_files.py says how it gets its name.

The reader trusts the manifest: it checks `.metadata` before it is unpickled, and every entry as it is read; tensors are
made of their bytes without unpickling. A checkpoint without a manifest (torch's own) is read with `verify=False`.
"""

import io
import os
import pickle
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage] - the format needs it
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from everstep.checkpoint.core import names
from everstep.checkpoint.core.archive import STORAGES, UNTYPED
from everstep.checkpoint.core.manifest import Entry, Manifest, checksum
from everstep.checkpoint.dcp_files import (
    Described,
    Item,
    Staging,
    Written,
    gather,
    holds_checkpoint,
    manifest_of,
    publish,
    write_file,
)
from everstep.checkpoint.fileops import FileOps, PosixFiles
from everstep.checkpoint.tensors import dtype_name
from everstep.checkpoint.unreachable import Retry, deadline_s, failure
from everstep.errors import CheckpointError, DamagedCheckpoint, UsageError

Bucket = tuple[str, list[WriteItem]]


class FileSystemWriter(dcp.FileSystemWriter):  # type: ignore[misc] # mypy does not read torch
    """Writes a checkpoint that has its name when it is whole and durable, and not before.

    Takes the arguments of torch's own; every file is fsynced, whatever `sync_files` says. One that has the name already
    is replaced in one step at the end, unless `overwrite=False`. Picklable before the save has begun.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.files: FileOps = PosixFiles()
        self._staging: Staging | None = None
        if getattr(self.transforms, "extensions", ()):
            raise UsageError("this writer writes DCP's plain format: _extensions are not supported")
        if str(getattr(self, "serialization_format", "TORCH_SAVE")).rpartition(".")[2] != "TORCH_SAVE":
            raise UsageError("this writer writes SerializationFormat.TORCH_SAVE; `everstep checkpoint convert` others")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin the next save, with another path where one is given."""
        self.drop()
        super().reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP at the start of a save. Raises UsageError for `use_collectives=False`."""
        if kwargs.get("use_collectives", True) is False:
            raise UsageError(
                "a checkpoint gets its name when all ranks have written, so that this writer needs "
                "use_collectives=True (the default)"
            )
        self.drop()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See that the name may be taken; nothing is made yet."""
        if not self.overwrite and holds_checkpoint(str(self.path)):
            raise CheckpointError(f"{self.path} holds a checkpoint, and overwrite=False: save to another name")
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Raises OSError with the file's name; nothing of them stays then."""
        staging = self.begin()
        try:
            with ThreadPoolExecutor(max(1, self.thread_count)) as pool:
                parts = list(pool.map(partial(self._bucket, staging, planner), self.buckets(plan)))
        except BaseException:
            self.drop()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for part in parts for result in part])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all have written: make it the checkpoint of its name."""
        staging = self._staging or self.begin()
        try:
            every = [result for one in results for result in one]
            facts = gather(self.files, staging, [result.storage_data for result in every])
            manifest = manifest_of(
                str(self.path), staging.token, len(results), facts, [_described(metadata, result) for result in every]
            )
            publish(self.files, staging, str(self.path), manifest, self._metadata(metadata, every))
        finally:
            self.drop()

    def begin(self) -> Staging:
        """Make the folder of this rank's part."""
        self.drop()
        self._staging = Staging(str(self.path), self.files)
        return self._staging

    def drop(self) -> None:
        """Forget a save that has begun, and remove what is left of it."""
        if self._staging is not None:
            self._staging.discard()
            self._staging = None

    def buckets(self, plan: SavePlan) -> list[Bucket]:
        """Return what goes into which file of this rank: by size, a file for each thread."""
        prefix = plan.storage_data.prefix
        count = self.thread_count if self.single_file_per_rank else len(plan.items)
        filled = [items for items in split(plan.items, count) if items]
        return [(f"{prefix}{n}.distcp", items) for n, items in enumerate(filled)]

    def _bucket(self, staging: Staging, planner: SavePlanner, bucket: Bucket) -> list[WriteResult]:
        name, items = bucket
        written = write_file(
            self.files, staging.folder, name, (item_of(one, planner.resolve_data(one)) for one in items)
        )
        return [result_of(one, at) for one, at in zip(items, written, strict=True)]

    def _metadata(self, metadata: Metadata, results: Iterable[WriteResult]) -> bytes:
        version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        if version is not None:
            metadata.version = version
        places = {
            one.index: _StorageInfo(one.storage_data.file, one.storage_data.at, one.storage_data.length)
            for one in results
        }
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        return pickle.dumps(metadata, protocol=4)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_staging": None}

    def __del__(self) -> None:
        if getattr(self, "_staging", None) is not None:
            self.drop()


def split(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Spread items over `count` buckets of about the same number of bytes, the order within each kept."""
    if count <= 1:
        return [list(items)]
    sizes, filled = [0] * count, [list[int]() for _ in range(count)]
    for n in sorted(range(len(items)), key=lambda n: -_size(items[n])):
        least = sizes.index(min(sizes))
        sizes[least] += _size(items[n])
        filled[least].append(n)
    return [[items[n] for n in sorted(bucket)] for bucket in filled]


def _size(item: WriteItem) -> int:
    told = item.tensor_data
    return told.chunk.sizes.numel() * told.properties.dtype.itemsize if told is not None else 1


def item_of(item: WriteItem, data: Any) -> Item:
    """Return what is to be written: of a tensor its elements on the host, row by row."""
    if item.type == WriteItemType.BYTE_IO:
        return Item(None, (), data.getbuffer() if isinstance(data, io.BytesIO) else bytes(data))
    tensor: Tensor = data.detach()
    name = dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or (name not in STORAGES and name not in UNTYPED):
        buffer = io.BytesIO()
        torch.save(tensor.cpu().clone(), buffer)
        return Item(f"saved {name}", tuple(tensor.shape), buffer.getbuffer())
    return Item(name, tuple(tensor.shape), elements(tensor))


def elements(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor, row by row; the tensor's own memory where they lie so already."""
    if tensor.numel() == 0:
        return memoryview(b"")
    host = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    raw: Any = host.reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def result_of(item: WriteItem, at: Written) -> WriteResult:
    """Return what DCP is told of a written item."""
    return WriteResult(index=item.index, size_in_bytes=at.length, storage_data=at)


def _described(metadata: Metadata, result: WriteResult) -> Described:
    told = metadata.state_dict_metadata[result.index.fqn]
    shape = tuple(told.size) if isinstance(told, TensorStorageMetadata) else ()
    offsets = result.index.offset
    return Described(
        result.index.fqn, shape, tuple(offsets) if offsets is not None else (0,) * len(shape), result.storage_data
    )


class FileSystemReader(dcp.FileSystemReader):  # type: ignore[misc] # mypy does not read torch
    """Reads a checkpoint, checking every byte that it reads; a wound is a DamagedCheckpoint that names file and tensor.

    What cannot be read is tried again for EVERSTEP_STORAGE_DEADLINE seconds, and then an UnreachableStorage.

    With `verify=False` it is torch's own reader, for a checkpoint that torch's own writer has written.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, verify: bool = True, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.verify = verify
        self._retry = Retry(deadline_s())
        self._entries: dict[tuple[str, int], Entry] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`, once the manifest says that it is what was written."""
        if self.verify:
            self._metadata_is(self._manifest())
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP with what the coordinator has read; each rank reads the manifest itself."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        if self.verify:
            self._entries = {(entry.file, entry.at): entry for entry in self._manifest().entries}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, each entry once, in the order in which they lie."""
        if not self.verify:
            return super().read_data(plan, planner)
        places = {id(item): self.storage_data[item.storage_index] for item in plan.items}
        ordered = sorted(plan.items, key=lambda item: (places[id(item)].relative_path, places[id(item)].offset))
        last: tuple[Entry | None, bytearray] = (None, bytearray())
        for item in ordered:
            entry = self._entry(places[id(item)], item)
            if last[0] is not entry:
                last = entry, self._verified(entry)
            _deliver(planner, item, entry, last[1])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _where(self, name: str) -> str:
        return os.path.join(str(self.path), name)

    def _manifest(self) -> Manifest:
        where = self._where(names.MANIFEST)
        try:
            return Manifest.from_bytes(self._retry(Path(where).read_bytes))
        except FileNotFoundError as error:
            raise DamagedCheckpoint(
                f"{where} is not there: a checkpoint that is not whole, or none of Everstep's. Pass verify=False to "
                "read one of torch's own, unchecked."
            ) from error
        except OSError as error:
            raise failure(where, error) from error
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{where}: {error}") from error

    def _metadata_is(self, manifest: Manifest) -> None:
        where, fact = self._where(names.METADATA), manifest.files.get(names.METADATA)
        try:
            content = self._retry(Path(where).read_bytes)
        except OSError as error:
            raise failure(where, error) from error
        if fact is None or (len(content), checksum(content)) != (fact.bytes, fact.xxh3):
            raise DamagedCheckpoint(f"{where}: does not match its checksum: cut or changed")

    def _entry(self, place: Any, item: ReadItem) -> Entry:
        entry = self._entries.get((place.relative_path, place.offset))
        if entry is None or os.path.basename(entry.file) != entry.file:
            raise DamagedCheckpoint(
                f"{self._where(names.MANIFEST)}: knows nothing of {item.storage_index.fqn} at {place.relative_path}, "
                f"{place.offset}; the two descriptions of this checkpoint differ"
            )
        return entry

    def _verified(self, entry: Entry) -> bytearray:
        where, content = self._where(entry.file), bytearray(entry.nbytes)
        try:
            done = self._retry(lambda: _filled(where, entry.data, content))
        except OSError as error:
            raise failure(where, error) from error
        if done < entry.nbytes:
            raise DamagedCheckpoint(f"{where}: ends inside {entry.name}, {entry.nbytes - done} bytes early: cut")
        with memoryview(content) as view:
            found = checksum(view)
        if found != entry.xxh3:
            raise DamagedCheckpoint(
                f"{where}: {entry.name} has checksum {found}, not {entry.xxh3}: its bytes were changed"
            )
        return content


def _filled(where: str, offset: int, content: bytearray) -> int:
    """Read a file from `offset` until `content` is full or it ends; return how many bytes it was."""
    with open(where, "rb", buffering=0) as file, memoryview(content) as view:
        file.seek(offset)
        done = 0
        while done < len(view) and (count := file.readinto(view[done:])):
            done += count
        return done


def _deliver(planner: LoadPlanner, item: ReadItem, entry: Entry, content: bytearray) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(content))
        return
    stored = _tensor(entry, content)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != stored.shape:
        raise CheckpointError(
            f"{entry.name}: the part that is asked for has shape {tuple(target.shape)}, what is stored there has "
            f"{tuple(stored.shape)}"
        )
    target.copy_(stored)
    planner.commit_tensor(item, target)


def _tensor(entry: Entry, content: bytearray) -> Tensor:
    if entry.dtype not in STORAGES and entry.dtype not in UNTYPED:
        loaded: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return loaded
    kind: torch.dtype = getattr(torch, entry.dtype)
    if not content:
        return torch.empty(entry.sizes, dtype=kind)
    return torch.frombuffer(content, dtype=torch.uint8).view(kind).view(entry.sizes)
