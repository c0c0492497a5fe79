"""One file that `torch.load` reads, written so that it is whole or not there; and its checksum, asked again.

The archive is the zip that `torch.save` makes: records, stored without compression, each element row at a multiple of
64 bytes. Its end carries a comment: the number of bytes before it and their xxh3, so that whoever reads the file can
tell whether one bit of it has changed, and `torch.load` minds nothing. No torch here.

    write to `.NAME.<token>.tmp` beside it ─▶ fsync ─▶ rename to NAME ─▶ fsync of the folder

What had the name before is untouched until the rename; a failure takes the temporary file away again.
"""

import contextlib
import os
import re
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from everstep.checkpoint.fileops import Data, FileOps, PosixFiles, close, naming, sync, write_all
from everstep.errors import DamagedCheckpoint

ALIGNMENT = 64
PIECE = 4 << 20
FOLDER = "archive"
_HEADER = 30  # bytes of a zip's local header, without name and extra field
_ZIP64 = 20  # bytes of the extra field that large sizes take
_LARGE = 0x7FFFFFFF
_END = struct.Struct("<IHHHHIIH")
_COMMENT = "everstep 1 xxh3 {hash} bytes {count:016x}"
_TOLD = re.compile(rb"everstep 1 xxh3 ([0-9a-f]{16}) bytes ([0-9a-f]{16})\Z")
_COMMENT_BYTES = len(_COMMENT.format(hash="0" * 16, count=0))
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Record:
    """A member of the archive, and its content."""

    name: str
    content: Data


class _Stream:
    """What the zip is written to: hashes as it writes, and keeps back what comes after `hold`."""

    def __init__(self, files: FileOps, path: str) -> None:
        self._files, self._path = files, path
        self._hash = xxhash.xxh3_64()
        self._held: bytearray | None = None
        self.given_up = False
        self.count = 0
        self.fd = files.create(path)

    def write(self, data: Data) -> int:
        if self.given_up:  # a zip that is left in the midst still writes its end when it is collected
            return len(data)
        if self._held is not None:
            self._held += data
        else:
            self._put(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back but the end."""

    def hold(self) -> None:
        self._held = bytearray()

    def end(self) -> None:
        """Write what was held, with the comment that says how all of it must read."""
        assert self._held is not None
        self._put(self._held[: -_LENGTH.size])
        told = _COMMENT.format(hash=self._hash.hexdigest(), count=self.count)
        write_all(self._files, self.fd, _LENGTH.pack(_COMMENT_BYTES) + told.encode(), self._path)

    def _put(self, data: Data | bytearray) -> None:
        with memoryview(data) as view:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                self._hash.update(piece)
                write_all(self._files, self.fd, piece, self._path)
            self.count += len(view)


def write_archive(path: str, temporary: str, records: Iterable[Record], files: FileOps | None = None) -> None:
    """Write the archive to `temporary`, then give it the name `path`. Both lie in one folder.

    Raises OSError as the file system does, with the file's name in it; `temporary` is removed again.
    """
    files = files or PosixFiles()
    try:
        write_durably(temporary, records, files)
        files.rename(temporary, path)
        files.fsync_dir(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise


def write_durably(path: str, records: Iterable[Record], files: FileOps) -> None:
    """Write the archive to a new file, and return when its content is durable."""
    stream = _Stream(files, path)
    try:
        with naming(path):
            _fill(stream, records)
        sync(files, stream.fd, path)
    finally:
        close(files, stream.fd, path)


def _fill(stream: _Stream, records: Iterable[Record]) -> None:
    archive = zipfile.ZipFile(stream, "w")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue] - it only writes
    try:
        for record in records:
            _member(archive, stream, record)
        _member(archive, stream, Record("version", b"3\n"))
        stream.hold()
        archive.close()
        stream.end()
    except BaseException:
        stream.given_up = True
        archive.close()
        raise


def _member(archive: zipfile.ZipFile, stream: _Stream, record: Record) -> None:
    size = memoryview(record.content).nbytes
    info = zipfile.ZipInfo(f"{FOLDER}/{record.name}")
    info.file_size = size
    wide = size >= _LARGE
    fixed = stream.count + _HEADER + len(info.filename.encode()) + _ZIP64 * wide + 4
    padding = -fixed % ALIGNMENT
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=wide) as member, memoryview(record.content) as view:
        for start in range(0, size, PIECE):
            member.write(view[start : start + PIECE])


def temporary_name(path: str, token: str) -> str:
    """Return the name under which a file is written that is to become `path`."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.{token}.tmp")


def is_whole(path: str) -> bool:
    """True where the file ends as it should and has the size that its end names. Reads its last bytes only."""
    try:
        with open(path, "rb") as file:
            return isinstance(_told(file.fileno()), tuple)
    except OSError:
        return False


def verify(path: str) -> None:
    """Read the file against its checksum. Raises DamagedCheckpoint that names the file and the wound."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = _told(file.fileno())
            if isinstance(found, str):
                raise DamagedCheckpoint(f"{path}: {found}")
            expected, count = found
            hashed = xxhash.xxh3_64()
            while count > 0 and (piece := file.read(min(PIECE, count))):
                hashed.update(piece)
                count -= len(piece)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from error
    if hashed.hexdigest() != expected:
        raise DamagedCheckpoint(
            f"{path}: has checksum {hashed.hexdigest()}, not {expected}: its bytes were changed; take another copy"
        )


def _told(fd: int) -> tuple[str, int] | str:
    """Return the checksum and the bytes that it covers, as the file's end names them; or why it names none."""
    size, tail = os.fstat(fd).st_size, _COMMENT_BYTES + _LENGTH.size
    end = os.pread(fd, tail, max(0, size - tail))
    match = _TOLD.match(end[_LENGTH.size :])
    if match is None or end[: _LENGTH.size] != _LENGTH.pack(_COMMENT_BYTES):
        return "does not end with its checksum: cut, overwritten, or not written by Everstep"
    if int(match[2], 16) != size - tail:
        return f"has {size} bytes, not {int(match[2], 16) + tail}: bytes are missing, or were put in"
    return match[1].decode(), int(match[2], 16)
