"""DCP's own metadata of a checkpoint, for readers that know nothing of Everstep.

`.metadata` is a pickle by its format; we write it and never read it (EXPERIMENTS C6). It is a function of the manifest
alone, so that two mergers write the same bytes.
"""

import pickle
from collections.abc import Iterable
from itertools import groupby

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage] - the format needs it
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.checkpoint.core.manifest import Entry, Manifest


def metadata_bytes(manifest: Manifest) -> bytes:
    """Return the content of `.metadata`."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, group in groupby(manifest.entries, key=lambda entry: entry.name):
        chunks = list(group)
        described[name] = _described(chunks)
        paths[name] = chunks[0].path
        for n, entry in enumerate(chunks):
            index = MetadataIndex(name) if entry.dtype is None else MetadataIndex(name, torch.Size(entry.offsets), n)
            places[index] = _StorageInfo(entry.file, entry.at, entry.length)
    return pickle.dumps(
        Metadata(state_dict_metadata=described, planner_data=paths, storage_data=places, storage_meta=StorageMeta()),
        protocol=4,
    )


def _described(chunks: list[Entry]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = chunks[0]
    if first.dtype is None:
        return BytesStorageMetadata()
    kind: torch.dtype = getattr(torch, first.dtype)
    return TensorStorageMetadata(TensorProperties(dtype=kind), torch.Size(first.shape), list(_rectangles(chunks)))


def _rectangles(chunks: Iterable[Entry]) -> Iterable[ChunkStorageMetadata]:
    for entry in chunks:
        yield ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))
