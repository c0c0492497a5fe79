"""Checkpoints in an object store: data are immutable objects of one save, and one created object publishes them.

    step-120/manifest.json              created (If-None-Match: *): it is there, or there is no checkpoint of step 120
    step-120.0.3.9f3a77c1-7/            of the save that the manifest names: a whole directory of DCP's, for others
          __0_0.distcp  …  .metadata
    .everstep-owner.json                who writes here: created too, and renewed while its job lives

Rule 1: nothing is renamed or changed (EXPERIMENTS C4). A save that fails leaves objects that no manifest names, and
they are swept.
Rule 2: a create whose answer was lost is asked again and meets itself: content tells who made it.
Rule 3: what a job that has lost its ownership (object_claim.py) tries to publish is refused.
"""

import errno
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact, Fragment, Manifest, checksum, merge
from everstep.checkpoint.fileops import Data
from everstep.checkpoint.publish import Describe, parsed
from everstep.checkpoint.storage.api import OBJECTS, Found, Wound
from everstep.checkpoint.storage.bucket import Bucket, Item, Upload
from everstep.checkpoint.storage.owner import read_owner, told
from everstep.checkpoint.storage.posix import by_size, strangers, unread
from everstep.checkpoint.unreachable import ONCE, Retry, Wearing
from everstep.errors import CheckpointError, DamagedCheckpoint, UnreachableStorage

BLOCK = 8 << 20
BLOCKS = 8
"""Small reads are served from blocks: a state of a thousand tensors is not a thousand requests."""


def data_folder(save: str) -> str:
    """Where the objects of a save lie."""
    return save.removesuffix(".tmp")


class ObjectFiles:
    """`FileOps` of a bucket: a file is an upload until it is synced, once; directories are nothing but names."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._uploads: dict[int, Upload | None] = {}
        self._numbers = itertools.count(1_000_000)  # no descriptors of the system

    def _key(self, path: str) -> str:
        return path.removeprefix(f"{self._bucket.url}/")

    def mkdir(self, path: str) -> None:
        """Nothing."""

    def create(self, path: str) -> int:
        """Begin an object."""
        fd = next(self._numbers)
        self._uploads[fd] = self._bucket.upload(self._key(path))
        return fd

    def write(self, fd: int, data: Data) -> int:
        """Hand on more of it."""
        upload = self._uploads[fd]
        assert upload is not None, "written after it was synced"
        upload.write(data)
        return len(data)

    def fsync(self, fd: int) -> None:
        """Make it an object: nothing is added after this."""
        upload = self._uploads[fd]
        if upload is not None:
            upload.finish()
            self._uploads[fd] = None

    def close(self, fd: int) -> None:
        """Forget it; what was not synced leaves nothing behind."""
        upload = self._uploads.pop(fd)
        if upload is not None:
            upload.abandon()

    def fsync_dir(self, path: str) -> None:
        """Nothing: an object that is there has its name."""

    def rename(self, old: str, new: str) -> None:
        """Refused: object stores copy and delete, which is not atomic."""
        raise OSError(0, "object stores have no rename", old)

    def exchange(self, one: str, other: str) -> None:
        """Refused, as `rename`."""
        raise OSError(0, "object stores have no rename", one)

    def unlink(self, path: str) -> None:
        """Remove an object."""
        self._bucket.delete(self._key(path))

    def rmdir(self, path: str) -> None:
        """Nothing."""

    def listdir(self, path: str) -> list[str]:
        """Names below a prefix."""
        prefix = self._key(path).rstrip("/") + "/"
        return sorted({item.key.removeprefix(prefix).partition("/")[0] for item in self._bucket.items(prefix)})


class ObjectReading:
    """One checkpoint of a bucket."""

    def __init__(self, bucket: Bucket, step: int) -> None:
        self._bucket, self._step = bucket, step
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._sizes: dict[str, int] | None = None
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def manifest(self) -> bytes:
        """See `Reading.manifest`."""
        key = f"{names.committed(self._step)}/{names.MANIFEST}"
        return _sure(self._bucket, key, lambda: self._bucket.get(key))

    def _place(self) -> str:
        if self._folder is None:
            self._folder = data_folder(Manifest.from_bytes(self.manifest()).save)
        return self._folder

    def size(self, name: str) -> int | None:
        """See `Reading.size`."""
        if name == names.MANIFEST:
            return len(self.manifest())
        if self._sizes is None:
            prefix = f"{self._place()}/"
            self._sizes = {item.key.removeprefix(prefix): item.size for item in self._bucket.items(prefix)}
        return self._sizes.get(name)

    def read_into(self, name: str, into: memoryview, offset: int) -> int:
        """See `Reading.read_into`."""
        key = f"{self._place()}/{name}"
        if len(into) >= BLOCK // 2:
            part = self._read(key, offset, len(into))
        else:
            number, start = divmod(offset, BLOCK)
            part = self._block(key, number)[start : start + len(into)]
        into[: len(part)] = part
        return len(part)

    def _block(self, key: str, number: int) -> bytes:
        with self._lock:
            known = self._blocks.get((key, number))
            if known is not None:
                self._blocks.move_to_end((key, number))
                return known
        block = self._read(key, number * BLOCK, BLOCK)
        with self._lock:
            self._blocks[key, number] = block
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def _read(self, key: str, offset: int, count: int) -> bytes:
        return _sure(self._bucket, key, lambda: self._bucket.read(key, offset, count))

    def close(self) -> None:
        """See `Reading.close`."""
        self._blocks.clear()


def _sure(bucket: Bucket, key: str, call: Callable[[], bytes]) -> bytes:
    """Return what `call` reads of an object. That it is not there is an answer only where no listing shows it."""
    try:
        return call()
    except FileNotFoundError as error:
        if any(item.key == key for item in bucket.items(key)):
            raise OSError(errno.ESTALE, "it is listed, and is not found when it is read", key) from error
        raise


class ObjectStorage:
    """A prefix of an object store."""

    def __init__(self, bucket: Bucket, retry: Retry = ONCE) -> None:
        """`retry`: how often what a listing asks is asked again."""
        self._bucket, self._retry = bucket, retry
        self.directory = bucket.url
        self.files = ObjectFiles(bucket)

    def folder(self, name: str) -> str:
        """See `Storage.folder`."""
        return f"{self.directory}/{data_folder(name)}"

    def publish(
        self, folder: str, fragments: Iterable[Fragment], describe: Describe, metrics: Mapping[str, float] | None = None
    ) -> Manifest:
        """See `Storage.publish`."""
        manifest = merge(fragments).with_metrics(metrics or {})
        metadata = describe(manifest)
        manifest = manifest.with_file(names.METADATA, FileFact(len(metadata), checksum(metadata)))
        content = manifest.to_bytes()
        present = self._present(manifest.step)
        if present == content:
            return manifest  # the merger before us came so far
        self._check_owner(folder)
        self._bucket.put(f"{data_folder(folder)}/{names.METADATA}", metadata)
        self._check_whole(folder, manifest)
        key = f"{names.committed(manifest.step)}/{names.MANIFEST}"
        if present is not None or not self._bucket.create(key, content):  # a store may ignore the condition
            self._replace(key, content, manifest)
        return manifest

    def _present(self, step: int) -> bytes | None:
        try:
            return self._bucket.get(f"{names.committed(step)}/{names.MANIFEST}")
        except FileNotFoundError:
            return None

    def _check_owner(self, folder: str) -> None:
        staging = names.staging_of(folder)
        owner = read_owner(self._bucket)
        if staging is not None and owner and owner.get("job") != staging.job:
            raise CheckpointError(
                f"{self.directory} has been taken over by {told(owner)}, so this job publishes nothing there any more; "
                "end one of the two"
            )

    def _check_whole(self, folder: str, manifest: Manifest) -> None:
        prefix = f"{data_folder(folder)}/"
        sizes = {item.key.removeprefix(prefix): item.size for item in self._bucket.items(prefix)}
        for wound in by_size(manifest.step, sizes.get, manifest):
            raise CheckpointError(
                f"{self.directory}/{prefix}{wound.file} {wound.reason}, before it was published; somebody removed it"
            )

    def _replace(self, key: str, content: bytes, manifest: Manifest) -> None:
        """A checkpoint of that step is there: ours, whose answer was lost, or an older one (damaged, or given up)."""
        present = self._bucket.get(key)
        if present == content:
            return
        self._bucket.put(key, content)
        try:
            older = data_folder(Manifest.from_bytes(present).save)
        except DamagedCheckpoint:
            return  # what it named is swept at the next start
        if older != data_folder(manifest.save):
            self._delete_below(older)

    def condemn(self, name: str) -> None:
        """See `Storage.condemn`. The manifest goes: that is all that makes it a checkpoint."""
        key = f"{name}/{names.MANIFEST}"
        if not any(item.key == key for item in self._bucket.items(key)):
            raise FileNotFoundError(2, "No such checkpoint", f"{self.directory}/{name}")
        self._bucket.delete(key)

    def remove(self, name: str) -> list[str]:
        """See `Storage.remove`."""
        if names.staging_of(name) is not None:
            return [] if self._published(name) else self._delete_below(data_folder(name))
        self._bucket.delete(f"{name}/{names.MANIFEST}")
        folders = {item.key.partition("/")[0] for item in self._bucket.items(f"{name}.")}
        strange = [key for folder in sorted(folders) for key in self._remove_folder(folder)]
        return strange + [item.key.removeprefix(f"{name}/") for item in self._bucket.items(f"{name}/")]

    def _remove_folder(self, folder: str) -> list[str]:
        return self._delete_below(folder) if names.staging_of(f"{folder}.tmp") is not None else []

    def _published(self, token: str) -> bool:
        """True where the manifest of its step names this save: its create came through, and its answer did not."""
        staging = names.staging_of(token)
        assert staging is not None
        present = self._present(staging.step)
        try:
            return present is not None and Manifest.from_bytes(present).save == token
        except DamagedCheckpoint:
            return False

    def _delete_below(self, folder: str) -> list[str]:
        strange: list[str] = []
        for item in self._bucket.items(f"{folder}/"):
            name = item.key.removeprefix(f"{folder}/")
            if names.OURS_INSIDE.match(name):
                self._bucket.delete(item.key)
            else:
                strange.append(name)
        return strange

    def scan(self) -> list[Found]:
        """See `Storage.scan`."""
        retry = Wearing(self._retry)
        items = retry(lambda: self._bucket.items("step-"))
        found: list[Found] = []
        for item in items:
            folder, _, name = item.key.partition("/")
            step = names.step_of(folder)
            if step is not None and name == names.MANIFEST:
                found.append(self._look(step, item, items, retry))
        return sorted(found, key=lambda one: one.step, reverse=True)

    def _look(self, step: int, item: Item, items: Iterable[Item], retry: Retry) -> Found:
        path = f"{self.directory}/{names.committed(step)}"
        where = f"{path}/{names.MANIFEST}"
        try:
            manifest = parsed(where, lambda: retry(lambda: self._manifest(item.key)), step)
        except UnreachableStorage as error:
            away = unread(step, names.MANIFEST, error.__cause__)
            return Found(step, path, None, (away,), item.changed_s, item.size, OBJECTS)
        except DamagedCheckpoint as error:
            wound = Wound(step, names.MANIFEST, str(error).removeprefix(f"{where}: "))
            return Found(step, path, None, (wound,), item.changed_s, item.size, OBJECTS)
        prefix = f"{data_folder(manifest.save)}/"
        sizes = {one.key.removeprefix(prefix): one.size for one in items if one.key.startswith(prefix)}
        wounds = (*by_size(step, sizes.get, manifest), *strangers(step, sizes, manifest))
        return Found(step, path, manifest, wounds, item.changed_s, manifest.total_bytes, OBJECTS)

    def _manifest(self, key: str) -> bytes:
        return _sure(self._bucket, key, lambda: self._bucket.get(key))

    def reading(self, step: int) -> ObjectReading:
        """See `Storage.reading`."""
        return ObjectReading(self._bucket, step)
