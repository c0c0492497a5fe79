"""Checkpoints in an object store: data are immutable objects of one save, and one created object publishes them.

    step-120/manifest.json              created (If-None-Match: *): it is there, or there is no checkpoint of step 120
    step-120.0.3.9f3a77c1-7/            of the save that the manifest names: a whole directory of DCP's, for others
          __0_0.distcp  …  .metadata
    .everstep-owner.json                who writes here: created too, and renewed while its job lives

Rule 1: nothing is renamed or changed (EXPERIMENTS C4). A save that fails leaves objects that no manifest names, and
they are swept.
Rule 2: a create whose answer was lost is asked again and meets itself: content tells who made it.
Rule 3: a job renews its ownership; another takes it over only when it has seen no renewal for a lease, by its own
clock: no time of another machine is ever compared. What a job that lost it still tries to publish is refused.
"""

import itertools
import json
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact, Fragment, Manifest, checksum, merge
from everstep.checkpoint.fileops import Data
from everstep.checkpoint.publish import Describe, parsed
from everstep.checkpoint.storage.api import OBJECTS, Found, Wound
from everstep.checkpoint.storage.bucket import Bucket, Item, Upload
from everstep.checkpoint.storage.posix import by_size, strangers
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError, ConfigurationError, DamagedCheckpoint

OWNER = ".everstep-owner.json"
PROBE = ".everstep-probe-"
LEASE_S = 20.0
RENEW_S = 5.0
LOOK_S = 0.5
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
        return self._bucket.get(f"{names.committed(self._step)}/{names.MANIFEST}")

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
            part = self._bucket.read(key, offset, len(into))
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
        block = self._bucket.read(key, number * BLOCK, BLOCK)
        with self._lock:
            self._blocks[key, number] = block
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def close(self) -> None:
        """See `Reading.close`."""
        self._blocks.clear()


class ObjectStorage:
    """A prefix of an object store."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
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
        if self._present(manifest.step) == content:
            return manifest  # the merger before us came so far
        self._check_owner(folder)
        self._bucket.put(f"{data_folder(folder)}/{names.METADATA}", metadata)
        self._check_whole(folder, manifest)
        key = f"{names.committed(manifest.step)}/{names.MANIFEST}"
        if not self._bucket.create(key, content):
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
        for name, why in by_size(sizes.get, manifest):
            raise CheckpointError(
                f"{self.directory}/{prefix}{name} {why}, before it was published; somebody removed it"
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
        items = self._bucket.items("step-")
        found: list[Found] = []
        for item in items:
            folder, _, name = item.key.partition("/")
            step = names.step_of(folder)
            if step is not None and name == names.MANIFEST:
                found.append(self._look(step, item, items))
        return sorted(found, key=lambda one: one.step, reverse=True)

    def _look(self, step: int, item: Item, items: Iterable[Item]) -> Found:
        path = f"{self.directory}/{names.committed(step)}"
        where = f"{path}/{names.MANIFEST}"
        try:
            manifest = parsed(where, lambda: self._bucket.get(item.key), step)
        except DamagedCheckpoint as error:
            wound = Wound(step, names.MANIFEST, str(error).removeprefix(f"{where}: "))
            return Found(step, path, None, (wound,), item.changed_s, item.size, OBJECTS)
        prefix = f"{data_folder(manifest.save)}/"
        sizes = {one.key.removeprefix(prefix): one.size for one in items if one.key.startswith(prefix)}
        told = (*by_size(sizes.get, manifest), *strangers(sizes, manifest))
        wounds = tuple(Wound(step, *one) for one in told)
        return Found(step, path, manifest, wounds, item.changed_s, manifest.total_bytes, OBJECTS)

    def reading(self, step: int) -> ObjectReading:
        """See `Storage.reading`."""
        return ObjectReading(self._bucket, step)


def read_owner(bucket: Bucket) -> dict[str, Any]:
    """What the owner's object says; nothing where there is none, or it cannot be read."""
    try:
        found: object = json.loads(bucket.get(OWNER))
    except (FileNotFoundError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownArgumentType]


def told(owner: Mapping[str, Any]) -> str:
    """Say who an owner is."""
    return f"the run {owner.get('run')} (process {owner.get('pid')} on {owner.get('host')})"


class ObjectClaim:
    """A job's ownership of a prefix: an object that it made, and renews."""

    lock = ""
    over = True

    def __init__(
        self, bucket: Bucket, job: str, moving: Callable[[], None] = lambda: None, clock: Clock = SYSTEM
    ) -> None:
        self._bucket, self._job, self._moving, self._clock = bucket, job, moving, clock
        self._storage = ObjectStorage(bucket)
        self._over = threading.Event()
        self._renewer: threading.Thread | None = None
        self._beats = 0
        self._run = ""

    def take(self, run: str) -> list[str]:
        """See `Claiming.take`."""
        self._run = run
        warnings = list(self._probe())
        self._own()
        self._renewer = threading.Thread(target=self._renew, name="everstep-owner", daemon=True)
        self._renewer.start()
        return [*warnings, *self._sweep()]

    def close(self) -> None:
        """See `Claiming.close`."""
        renewer, self._renewer = self._renewer, None
        if renewer is None:
            return
        self._over.set()
        renewer.join(RENEW_S)
        try:
            if self.over and read_owner(self._bucket).get("job") == self._job:
                self._bucket.delete(OWNER)
        except OSError:
            return  # the next job finds it not renewed

    def _content(self) -> bytes:
        owner = {"job": self._job, "run": self._run, "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps(owner | {"beat": self._beats}).encode()

    def _probe(self) -> Iterator[str]:
        key, doing = f"{PROBE}{self._job}", "be written to"
        try:
            first = self._bucket.create(key, b"x")
            doing = "be listed"
            if not any(item.key == key for item in self._bucket.items(PROBE)):
                raise OSError(0, "what was just written is not in the listing")
            doing = "be read in ranges"
            if self._bucket.read(key, 0, 1) != b"x":
                raise OSError(0, "another byte came back")
            doing = "be written to twice under one name"
            again = self._bucket.create(key, b"y")
            doing = "remove an object"
            self._bucket.delete(key)
        except OSError as error:
            raise ConfigurationError(
                f"the checkpoint storage {self._bucket.url} cannot {doing}: {error.strerror or error}. Look at its "
                "name, region, credentials and rights (put, get, list and delete are needed), or give another "
                "--checkpoint-dir."
            ) from error
        self._moving()
        if again or not first:
            yield (
                f"warning: {self._bucket.url} does not honour conditional creation (If-None-Match: *): that two jobs "
                "write there would not always be noticed; see to it that none does"
            )

    def _own(self) -> None:
        """Create the owner's object, or take it over from a job that has not renewed it for a lease."""
        if self._bucket.create(OWNER, self._content()):
            return
        first = read_owner(self._bucket)
        deadline = self._clock.now() + LEASE_S
        while self._clock.now() < deadline and not self._dead(first):
            self._clock.sleep(LOOK_S)
            self._moving()
            if read_owner(self._bucket) != first:
                break
        else:
            if read_owner(self._bucket) == first:
                self._bucket.delete(OWNER)
        if self._bucket.create(OWNER, self._content()):
            return
        owner = read_owner(self._bucket)
        if owner.get("job") != self._job:
            raise ConfigurationError(
                f"the checkpoint storage {self._bucket.url} is in use by {told(owner)}, and two jobs would take each "
                "other's checkpoints for their own. End that job, or give --checkpoint-dir another prefix."
            )

    def _dead(self, owner: Mapping[str, Any]) -> bool:
        here = owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int)
        return here and not os.path.exists(f"/proc/{owner['pid']}")

    def _renew(self) -> None:
        while not self._clock.wait(self._over, RENEW_S):
            if not self.renew():
                return

    def renew(self) -> bool:
        """Show that this job lives; False where another has taken over: publishing says so."""
        try:
            if read_owner(self._bucket).get("job") not in (self._job, None):
                return False
            self._beats += 1
            self._bucket.put(OWNER, self._content())
        except OSError:
            return True  # the next one may come through; saves say what is wrong
        return True

    def _sweep(self) -> Iterator[str]:
        where = self._bucket.url
        for key in self._bucket.abort_uploads(""):
            yield f"aborted the upload of {where}/{key}, left over by a writer that is gone"
        kept = {data_folder(one.manifest.save) for one in self._storage.scan() if one.manifest is not None}
        items = self._bucket.items("")
        folders = sorted({item.key.partition("/")[0] for item in items if "/" in item.key})
        for folder in folders:
            if folder in kept or names.staging_of(f"{folder}.tmp") is None:
                continue
            strange = self._storage.remove(f"{folder}.tmp")
            self._moving()
            if strange:
                text = f"the leftover {where}/{folder} stays, it holds {', '.join(strange)}, which is not ours"
                yield f"warning: {text}"
            else:
                yield f"removed {where}/{folder}, left over by a writer that is gone"
        for item in items:
            if item.key.startswith(PROBE):
                self._bucket.delete(item.key)
