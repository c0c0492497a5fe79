"""From what `--checkpoint-dir` says to the storage behind it: a path, or any URL that fsspec knows."""

import os
import re
from collections.abc import Callable

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import Manifest
from everstep.checkpoint.directory import Claim
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.publish import parsed
from everstep.checkpoint.storage.api import Claiming, Reading, Storage
from everstep.checkpoint.storage.bucket import Bucket
from everstep.checkpoint.storage.fsspec_bucket import connect
from everstep.checkpoint.storage.object_claim import ObjectClaim
from everstep.checkpoint.storage.objects import ObjectStorage
from everstep.checkpoint.storage.posix import PosixReading, PosixStorage
from everstep.checkpoint.storage.retried import RetriedReading
from everstep.checkpoint.unreachable import ONCE, Retry, failure
from everstep.clock import SYSTEM, Clock
from everstep.errors import UsageError

Opening = Callable[[str], Reading]
"""Opens the checkpoint at a path or URL for reading: `reading`, or one who reads in another process."""
PIECE = 1 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL = ("file", "local")


def is_url(where: str) -> bool:
    """True for an object store, by its URL; a `file://` is a path."""
    match = _URL.match(where)
    return match is not None and match[1].lower() not in _LOCAL


def place_of(where: str) -> str:
    """Return an absolute path, or a URL without a slash at its end. UsageError for what cannot hold a checkpoint."""
    match = _URL.match(where)
    if match is None:
        return os.path.abspath(where)
    scheme, rest = match[1].lower(), where[match.end() :].strip("/")
    if scheme in _LOCAL:
        return os.path.abspath("/" + rest)
    if scheme == "memory":
        raise UsageError(
            f"{where} is memory of one process, and checkpoints are written by others: they would go with it. "
            "Give a directory, or the URL of an object store."
        )
    if not rest:
        raise UsageError(f"{where} names no bucket; write {scheme}://BUCKET/PREFIX")
    return f"{scheme}://{rest}"


def open_storage(where: str, files: FileOps | None = None, retry: Retry = ONCE) -> Storage:
    """Open what `where` names. `files`: what a path is written with, instead of the machine's own.

    `retry`: how long a listing that fails is asked for again.
    """
    place = place_of(where)
    if is_url(place):
        return ObjectStorage(connect(place), retry)
    return PosixStorage(place, files, retry=retry)


def claim(
    where: str, job: str, moving: Callable[[], None] = lambda: None, clock: Clock = SYSTEM, *, several: bool = False
) -> Claiming:
    """Return a job's claim on the place; nothing has been asked of it yet. `several`: see `directory.Claim`."""
    place = place_of(where)
    if is_url(place):
        return ObjectClaim(connect(place), job, moving, clock, several=several)
    return Claim(place, clock=clock, moving=moving, job=job, several=several)


def reading(path: str) -> Reading:
    """Read one checkpoint: `DIR/step-120`, or `s3://BUCKET/PREFIX/step-120`."""
    if not is_url(path):
        return PosixReading(path)
    above, _, name = path.rstrip("/").rpartition("/")
    step = names.step_of(name)
    if step is None:
        raise UsageError(f"{path} is no checkpoint: its name is not step-N")
    key = above, os.getpid()  # a connection does not outlive a fork
    if key not in _CONNECTED:
        _CONNECTED.clear()
        _CONNECTED[key] = connect(above)
    return ObjectStorage(_CONNECTED[key]).reading(step)


_CONNECTED: dict[tuple[str, int], Bucket] = {}
"""The last place that was read from: a restore opens it for each file."""


def retried(through: Opening, retry: Retry) -> Opening:
    """Return what opens by way of `through`, and reads again what could not be read."""
    return lambda path: RetriedReading(through(path), retry)


def read_manifest(path: str, through: Opening = reading) -> Manifest:
    """Read the manifest of the checkpoint at `path`. DamagedCheckpoint and UnreachableStorage name file and reason."""
    source = through(path)
    where = f"{path.rstrip('/')}/{names.MANIFEST}"
    try:
        return parsed(where, source.manifest, names.step_of(os.path.basename(path.rstrip("/"))))
    finally:
        source.close()


def content(path: str, name: str, size: int, through: Opening = reading) -> bytes:
    """Return a file of a checkpoint that should have `size` bytes: fewer where it is cut, one more where longer.

    Memory is taken for what is there, not for what `size` promises: that may be anybody's word. DamagedCheckpoint where
    there is no such file, UnreachableStorage where it cannot be read now.
    """
    source, made, done = through(path), bytearray(min(size + 1, PIECE)), 0
    try:
        while done <= size:
            if done == len(made):
                made.extend(bytes(min(size + 1 - done, done)))
            with memoryview(made) as view:
                count = source.read_into(name, view[done:], done)
            if not count:
                break
            done += count
    except OSError as error:
        raise failure(f"{path.rstrip('/')}/{name}", error) from error
    finally:
        source.close()
    return bytes(made[:done])
