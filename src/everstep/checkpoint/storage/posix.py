"""Checkpoints in a directory of the machine's file system: core/names.py says what lies there, publish.py how."""

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import Fragment, Manifest
from everstep.checkpoint.fileops import FileOps, PosixFiles
from everstep.checkpoint.publish import Describe, condemn, parsed, publish, remove
from everstep.checkpoint.storage.api import Found, Wound
from everstep.errors import DamagedCheckpoint


class PosixReading:
    """A committed checkpoint's directory, its files opened as they are needed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def manifest(self) -> bytes:
        """See `Reading.manifest`."""
        fd = _regular(os.path.join(self.path, names.MANIFEST))
        with open(fd, "rb") as file:
            return file.read()

    def size(self, name: str) -> int | None:
        """See `Reading.size`."""
        try:
            found = os.stat(os.path.join(self.path, name))
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read_into(self, name: str, into: memoryview, offset: int) -> int:
        """See `Reading.read_into`."""
        with self._lock:
            if name not in self._fds:
                self._fds[name] = _regular(os.path.join(self.path, name))
            fd = self._fds[name]
        return os.preadv(fd, [into], offset)

    def close(self) -> None:
        """See `Reading.close`."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


def _regular(path: str) -> int:
    """Open a file for reading, and nothing that could keep the caller waiting (a pipe, a device)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(0, "is no regular file", path)


class PosixStorage:
    """A directory."""

    def __init__(self, directory: str, files: FileOps | None = None) -> None:
        self.directory = os.path.abspath(directory)
        self.files: FileOps = files or PosixFiles()

    def folder(self, name: str) -> str:
        """See `Storage.folder`."""
        return os.path.join(self.directory, name)

    def publish(
        self, folder: str, fragments: Iterable[Fragment], describe: Describe, metrics: Mapping[str, float] | None = None
    ) -> Manifest:
        """See `Storage.publish`."""
        return publish(self.files, self.directory, self.folder(folder), fragments, describe, metrics)

    def condemn(self, name: str) -> None:
        """See `Storage.condemn`."""
        condemn(self.files, self.folder(name))

    def remove(self, name: str) -> list[str]:
        """See `Storage.remove`."""
        strange = remove(self.files, self.folder(name))
        self.files.fsync_dir(self.directory)
        return strange

    def scan(self) -> list[Found]:
        """See `Storage.scan`."""
        inside = os.listdir(self.directory)
        steps = sorted((step for name in inside if (step := names.step_of(name)) is not None), reverse=True)
        found = (look(self.folder(names.committed(step)), step) for step in steps)
        return [one for one in found if one is not None]

    def reading(self, step: int) -> PosixReading:
        """See `Storage.reading`."""
        return PosixReading(self.folder(names.committed(step)))


def look(path: str, step: int) -> Found | None:
    """Look at one checkpoint without reading its data; None where there is no directory, or somebody else's."""
    try:
        changed = os.stat(path).st_mtime
        inside = os.listdir(path)
    except OSError:
        return None
    if names.CONDEMNED in inside or not any(names.OURS_INSIDE.match(name) for name in inside):
        return None
    reading = PosixReading(path)
    try:
        manifest = parsed(os.path.join(path, names.MANIFEST), reading.manifest, step)
    except DamagedCheckpoint as error:
        reason = str(error).removeprefix(f"{os.path.join(path, names.MANIFEST)}: ")
        return Found(step, path, None, (Wound(step, names.MANIFEST, reason),), changed, sum(_sizes(path)))
    told = (*by_size(reading.size, manifest), *strangers(inside, manifest))
    return Found(step, path, manifest, tuple(Wound(step, *one) for one in told), changed, manifest.total_bytes)


def by_size(size_of: Callable[[str], int | None], manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Return the files of a checkpoint that are not as long as they should be, and how."""
    for name, fact in manifest.files.items():
        try:
            size = size_of(name)
        except OSError as error:
            yield name, f"cannot be read: {error.strerror or error}"
            continue
        if size is None:
            yield name, f"is missing; {fact.bytes} bytes expected"
        elif size != fact.bytes:
            yield name, f"has {size} bytes, not {fact.bytes}: {'cut' if size < fact.bytes else 'longer than written'}"


def strangers(inside: Iterable[str], manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Files with a name of ours that the manifest does not know: two saves have been mixed here."""
    for name in sorted(inside):
        if names.OURS_INSIDE.match(name) and name != names.MANIFEST and name not in manifest.files:
            yield name, "is none of this checkpoint's files: copied here, or left by another save"


def _sizes(path: str) -> Iterator[int]:
    with os.scandir(path) as entries:
        yield from (entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
