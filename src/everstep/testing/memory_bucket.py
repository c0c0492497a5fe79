"""An object store in memory, with the wounds that real ones have: passes the same rules, needs no server."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.checkpoint.fileops import Data
from everstep.checkpoint.storage.bucket import Item


@dataclass
class MemoryBucket:
    """`Bucket` of a dictionary. `before` and `after` are called with (verb, key) around each call: they may raise."""

    url: str = "fake://bucket/prefix"
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])
    uploads: dict[int, str] = field(default_factory=dict[int, str])
    exclusive: bool = True  # False: a store that ignores If-None-Match
    before: Callable[[str, str], None] = lambda verb, key: None
    after: Callable[[str, str], None] = lambda verb, key: None

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._time = itertools.count(1_700_000_000)

    def _set(self, key: str, data: bytes) -> None:
        self.objects[key] = bytes(data), float(next(self._time))

    def create(self, key: str, data: bytes) -> bool:
        """See `Bucket.create`."""
        self.before("create", key)
        made = not self.exclusive or key not in self.objects
        if made:
            self._set(key, data)
        self.after("create", key)
        return made

    def put(self, key: str, data: bytes) -> None:
        """See `Bucket.put`."""
        self.before("put", key)
        self._set(key, data)
        self.after("put", key)

    def get(self, key: str) -> bytes:
        """See `Bucket.get`."""
        self.before("get", key)
        if key not in self.objects:
            raise FileNotFoundError(2, "No such object", f"{self.url}/{key}")
        return self.objects[key][0]

    def read(self, key: str, offset: int, count: int) -> bytes:
        """See `Bucket.read`."""
        return self.get(key)[offset : offset + count]

    def items(self, prefix: str) -> list[Item]:
        """See `Bucket.items`."""
        self.before("items", prefix)
        found = sorted(key for key in self.objects if key.startswith(prefix))
        return [Item(key, len(self.objects[key][0]), self.objects[key][1]) for key in found]

    def delete(self, key: str) -> None:
        """See `Bucket.delete`."""
        self.before("delete", key)
        self.objects.pop(key, None)
        self.after("delete", key)

    def upload(self, key: str) -> "MemoryUpload":
        """See `Bucket.upload`."""
        self.before("upload", key)
        number = next(self._numbers)
        self.uploads[number] = key
        return MemoryUpload(self, key, number)

    def abort_uploads(self, prefix: str) -> list[str]:
        """See `Bucket.abort_uploads`."""
        going = {number: key for number, key in self.uploads.items() if key.startswith(prefix)}
        for number in going:
            del self.uploads[number]
        return sorted(going.values())


class MemoryUpload:
    """`Upload` into it."""

    def __init__(self, bucket: MemoryBucket, key: str, number: int) -> None:
        self._bucket, self._key, self._number = bucket, key, number
        self._content = bytearray()

    def write(self, data: Data) -> None:
        """See `Upload.write`."""
        self._bucket.before("write", self._key)
        self._content += data

    def finish(self) -> None:
        """See `Upload.finish`."""
        self._bucket.before("finish", self._key)
        self._bucket.uploads.pop(self._number, None)
        self._bucket.objects[self._key] = bytes(self._content), 0.0
        self._bucket.after("finish", self._key)

    def abandon(self) -> None:
        """See `Upload.abandon`."""
        self._bucket.uploads.pop(self._number, None)
