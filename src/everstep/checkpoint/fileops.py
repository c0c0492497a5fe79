"""The few things that the disk tier does to files: one door, so that a test can stand in it with any wound or kill.

Every method is one system call, or ends as one would: a call that raises has either happened or not. Durability is
asked for by name (`fsync`, `fsync_dir`) and by nobody else.
"""

import ctypes
import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from everstep.errors import CheckpointError

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_EXCHANGE = 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
Data = bytes | memoryview


class FileOps(Protocol):
    """What writers do to files. All raise OSError as the system does."""

    def mkdir(self, path: str) -> None:
        """Make a directory; FileExistsError where something has that name."""
        ...

    def create(self, path: str) -> int:
        """Make a new file and return its descriptor for writing; FileExistsError where something has that name."""
        ...

    def write(self, fd: int, data: Data) -> int:
        """Append some of `data`; return how many bytes."""
        ...

    def fsync(self, fd: int) -> None:
        """Return when the file's content is durable."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def fsync_dir(self, path: str) -> None:
        """Return when the names in a directory are durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file or directory a new name, atomically; a directory does not replace one that holds something."""
        ...

    def exchange(self, one: str, other: str) -> None:
        """Exchange two names atomically."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Names in a directory."""
        ...


class PosixFiles:
    """The machine's file system."""

    def mkdir(self, path: str) -> None:
        """See `FileOps.mkdir`."""
        os.mkdir(path)

    def create(self, path: str) -> int:
        """See `FileOps.create`."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: Data) -> int:
        """See `FileOps.write`."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """See `FileOps.fsync`."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """See `FileOps.close`."""
        os.close(fd)

    def fsync_dir(self, path: str) -> None:
        """See `FileOps.fsync_dir`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """See `FileOps.rename`."""
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        """See `FileOps.exchange`. Where the file system cannot, two renames: for an instant `other` has no name."""
        if _LIBC.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_EXCHANGE:
            raise OSError(code, os.strerror(code), one, None, other)
        aside = one + ".aside"
        os.rename(other, aside)
        os.rename(one, other)
        os.rename(aside, one)

    def unlink(self, path: str) -> None:
        """See `FileOps.unlink`."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """See `FileOps.rmdir`."""
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """See `FileOps.listdir`."""
        return sorted(os.listdir(path))


def write_all(files: FileOps, fd: int, data: Data, path: str) -> None:
    """Write all of `data`, however many calls it takes; an error carries `path`."""
    with naming(path), memoryview(data) as view:
        done = 0
        while done < len(view):
            count = files.write(fd, view[done:])
            if count <= 0:
                raise CheckpointError(
                    f"{path}: the file system took {count} of {len(view) - done} bytes, no reason given"
                )
            done += count


def sync(files: FileOps, fd: int, path: str) -> None:
    """Return when the content is durable; an error carries `path`."""
    with naming(path):
        files.fsync(fd)


def put(files: FileOps, path: str, content: bytes) -> None:
    """Make a new durable file of `content`; the name itself is durable after `fsync_dir`."""
    fd = files.create(path)
    try:
        write_all(files, fd, content, path)
        sync(files, fd, path)
    finally:
        close(files, fd, path)


def close(files: FileOps, fd: int, path: str) -> None:
    """Close; an error (a network file system tells of lost writes here) carries `path`."""
    with naming(path):
        files.close(fd)


@contextmanager
def naming(path: str) -> Generator[None]:
    """Give an OSError of a call by descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise
