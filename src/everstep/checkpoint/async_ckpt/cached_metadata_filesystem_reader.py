"""A DCP reader that reads `.metadata` once, under NVRx's name."""

import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from everstep.checkpoint.core import names
from everstep.checkpoint.dcp_storage import FileSystemReader

_Stamp = tuple[int, int, int]
_cache: dict[str, tuple[_Stamp, Metadata]] = {}


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads as `everstep.checkpoint.dcp_storage.FileSystemReader` does; a checkpoint without a manifest, of NVRx's own
    or of torch's, as torch does.

    With `cache_metadata` the metadata of a path is read once by all readers of this process, for as long as its file is
    the same one: a checkpoint that was replaced is read again.
    """

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path, verify=os.path.exists(os.path.join(os.fspath(path), names.MANIFEST)))
        self.cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. Raises what the reader does."""
        where = os.path.abspath(os.path.join(str(self.path), names.METADATA))
        if not self.cache_metadata or not os.path.exists(where):
            return super().read_metadata(*args, **kwargs)
        found = os.stat(where)
        stamp = found.st_ino, found.st_mtime_ns, found.st_size
        known = _cache.get(where)
        if known is None or known[0] != stamp:
            known = _cache[where] = stamp, super().read_metadata(*args, **kwargs)
        return known[1]

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata of one checkpoint, or of all."""
        if path is None:
            _cache.clear()
        else:
            _cache.pop(os.path.abspath(os.path.join(os.fspath(path), names.METADATA)), None)
