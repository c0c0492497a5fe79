"""Checkpoints in a directory of the machine's file system: core/names.py says what lies there, publish.py how."""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import Fragment, Manifest
from everstep.checkpoint.fileops import FileOps, PosixFiles
from everstep.checkpoint.publish import Describe, condemn, parsed, publish, remove
from everstep.checkpoint.storage.api import Found, Wound
from everstep.checkpoint.unreachable import NOW, ONCE, Retry, Wearing, is_answer, why
from everstep.errors import DamagedCheckpoint, UnreachableStorage

PIECE = 1 << 20
T = TypeVar("T")


class Eyes:
    """What is asked of the file system to read: one door, so that a test can stand in it. Errors are the system's."""

    def listdir(self, path: str) -> list[str]:
        """Names in a directory."""
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        """What a path is."""
        return os.stat(path)

    def open(self, path: str) -> int:
        """Open a regular file, and nothing that could keep the caller waiting (a pipe, a device)."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, "is no regular file", path)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read some bytes; 0 at the end."""
        return os.preadv(fd, [into], offset)


EYES = Eyes()


class PosixReading:
    """A committed checkpoint's directory, its files opened as they are needed."""

    def __init__(self, path: str, eyes: Eyes = EYES) -> None:
        self.path, self._eyes = path, eyes
        self._fds: dict[str, int] = {}
        self._failed: list[int] = []
        self._lock = threading.Lock()

    def manifest(self) -> bytes:
        """See `Reading.manifest`."""
        made = bytearray()
        try:
            fd = self._opened(names.MANIFEST)
        except FileNotFoundError:
            check_place(os.path.dirname(os.path.abspath(self.path)), self._eyes)
            raise
        try:
            piece = memoryview(bytearray(PIECE))
            while count := self._eyes.read(fd, piece, len(made)):
                made += piece[:count]
        finally:
            os.close(fd)
        return bytes(made)

    def size(self, name: str) -> int | None:
        """See `Reading.size`."""
        try:
            found = _sure(os.path.join(self.path, name), self._eyes.stat, self._eyes)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read_into(self, name: str, into: memoryview, offset: int) -> int:
        """See `Reading.read_into`. A descriptor that has failed is not read from again: the file may be another."""
        with self._lock:
            if name not in self._fds:
                self._fds[name] = self._opened(name)
            fd = self._fds[name]
        try:
            return self._eyes.read(fd, into, offset)
        except OSError:
            with self._lock:
                if self._fds.get(name) == fd:
                    self._failed.append(self._fds.pop(name))  # others may be reading from it
            raise

    def _opened(self, name: str) -> int:
        return _sure(os.path.join(self.path, name), self._eyes.open, self._eyes)

    def close(self) -> None:
        """See `Reading.close`."""
        with self._lock:
            for fd in (*self._fds.values(), *self._failed):
                os.close(fd)
            self._fds.clear()
            self._failed.clear()


def check_place(directory: str, eyes: Eyes = EYES) -> None:
    """Raise OSError where a directory that held checkpoints has nothing of ours any more: its mount went away."""
    if not any(name.startswith(names.HIDDEN) or names.step_of(name) is not None for name in _there(directory, eyes)):
        raise OSError(errno.ENODEV, "nothing of Everstep's is there any more: a mount went away", directory)


def _sure(path: str, call: Callable[[str], T], eyes: Eyes) -> T:
    """Return what `call` says of `path`. "It is not there" is an answer where no listing shows it, or it is a link."""
    try:
        return call(path)
    except FileNotFoundError as error:
        if os.path.basename(path) in _there(os.path.dirname(path), eyes) and not os.path.islink(path):
            raise OSError(errno.ESTALE, "it is listed, and is not found when it is opened", path) from error
        raise


def _there(directory: str, eyes: Eyes) -> list[str]:
    try:
        return eyes.listdir(directory)
    except FileNotFoundError:
        return []


class PosixStorage:
    """A directory."""

    def __init__(self, directory: str, files: FileOps | None = None, eyes: Eyes = EYES, retry: Retry = ONCE) -> None:
        """`retry`: how often what a listing asks is asked again; `eyes`: what it is asked with."""
        self.directory = os.path.abspath(directory)
        self.files: FileOps = files or PosixFiles()
        self._eyes, self._retry = eyes, retry

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
        retry = Wearing(self._retry)
        inside = retry(lambda: self._eyes.listdir(self.directory))
        steps = sorted((step for name in inside if (step := names.step_of(name)) is not None), reverse=True)
        found = (look(self.folder(names.committed(step)), step, self._eyes, retry) for step in steps)
        return [one for one in found if one is not None]

    def reading(self, step: int) -> PosixReading:
        """See `Storage.reading`."""
        return PosixReading(self.folder(names.committed(step)), self._eyes)


def look(path: str, step: int, eyes: Eyes = EYES, retry: Retry = ONCE) -> Found | None:
    """Look at one checkpoint without reading its data; None where there is no directory, or somebody else's."""
    try:
        changed = retry(lambda: _sure(path, eyes.stat, eyes)).st_mtime
        inside = retry(lambda: _sure(path, eyes.listdir, eyes))
    except OSError as error:
        return None if is_answer(error) else Found(step, path, None, (unread(step, names.MANIFEST, error),), 0.0, 0)
    if names.CONDEMNED in inside or not any(names.OURS_INSIDE.match(name) for name in inside):
        return None
    reading, where = PosixReading(path, eyes), os.path.join(path, names.MANIFEST)
    try:
        manifest = parsed(where, lambda: retry(reading.manifest), step)
    except UnreachableStorage as error:
        return Found(step, path, None, (unread(step, names.MANIFEST, error.__cause__),), changed, 0)
    except DamagedCheckpoint as error:
        reason = str(error).removeprefix(f"{where}: ")
        return Found(step, path, None, (Wound(step, names.MANIFEST, reason),), changed, _size_of(path, inside, eyes))
    told = (
        *by_size(step, lambda name: retry(lambda: reading.size(name)), manifest), *strangers(step, inside, manifest)
    )  # fmt: skip
    return Found(step, path, manifest, told, changed, manifest.total_bytes)


def unread(step: int, file: str, error: BaseException | None) -> Wound:
    """What could not be looked at now."""
    return Wound(step, file, f"{NOW}: {why(error) if isinstance(error, OSError) else error}", unread=True)


def by_size(step: int, size_of: Callable[[str], int | None], manifest: Manifest) -> Iterator[Wound]:
    """Return the files of a checkpoint that are not as long as they should be, and how."""
    for name, fact in manifest.files.items():
        try:
            size = size_of(name)
        except OSError as error:
            yield unread(step, name, error)
            continue
        if size is None:
            yield Wound(step, name, f"is missing; {fact.bytes} bytes expected")
        elif size != fact.bytes:
            how = "cut" if size < fact.bytes else "longer than written"
            yield Wound(step, name, f"has {size} bytes, not {fact.bytes}: {how}")


def strangers(step: int, inside: Iterable[str], manifest: Manifest) -> Iterator[Wound]:
    """Files with a name of ours that the manifest does not know: two saves have been mixed here."""
    for name in sorted(inside):
        if names.OURS_INSIDE.match(name) and name != names.MANIFEST and name not in manifest.files:
            yield Wound(step, name, "is none of this checkpoint's files: copied here, or left by another save")


def _size_of(path: str, inside: Iterable[str], eyes: Eyes) -> int:
    """Bytes as they lie there, of as much as can be looked at."""
    size = 0
    for name in inside:
        with contextlib.suppress(OSError):
            found = eyes.stat(os.path.join(path, name))
            size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return size
