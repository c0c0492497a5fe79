"""The archive that `torch.save` makes of one tensor, built around bytes that stay where they are.

DCP stores each tensor of a `.distcp` file as such an archive: a zip, stored without compression, of a small pickle and
the raw elements. Rule 1: the place of the elements is known before the first byte is written, so that our own reader
takes them by offset and length and never unpickles (EXPERIMENTS C6). Rule 2: the elements are handed on as they lie in
the snapshot, so that a shard needs no second copy of it in memory. Rule 3: the same tensor gives the same bytes.

    head: data.pkl  byteorder  version  header of data/0 │ the elements │ tail: their CRC, the directory of the zip

Rejected: `torch.save` into a file object. It hides the error of a full disk behind one of its own, names each archive
by a random number, and its place of the elements must be searched for afterwards.
"""

import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

STORAGES = {
    "float64": ("DoubleStorage", 8), "float32": ("FloatStorage", 4), "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2), "int64": ("LongStorage", 8), "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2), "int8": ("CharStorage", 1), "uint8": ("ByteStorage", 1), "bool": ("BoolStorage", 1),
    "complex64": ("ComplexFloatStorage", 8), "complex128": ("ComplexDoubleStorage", 16),
}  # fmt: skip
"""Element types with a storage class of their own, and the bytes of one element."""

UNTYPED = {
    "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Newer element types: torch writes an untyped storage and names the type beside it."""

ALIGNMENT = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_LIMIT = 0xFFFFFFFF
_UTF8, _LATE_CRC = 0x800, 0x8
_VERSION = 45  # the first with 64-bit sizes
_PICKLE, _ORDER, _FORMAT, _DATA = "archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises ValueError for a type that no archive is known for."""
    size = STORAGES[dtype][1] if dtype in STORAGES else UNTYPED.get(dtype)
    if size is None:
        raise ValueError(f"element type {dtype!r} cannot be written to a checkpoint; convert the tensor before saving")
    return size


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    offset: int
    size: int
    crc: int
    late: bool = False


class TensorArchive:
    """One tensor's archive: write `head`, the elements, then `tail(crc of the elements)`."""

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self.data_bytes = item_bytes(dtype) * math.prod(shape)
        self._members: list[_Member] = []
        head = _small(self._members, b"", _PICKLE, _tensor_pickle(dtype, shape))
        head = _small(self._members, head, _ORDER, b"little")
        head = _small(self._members, head, _FORMAT, b"3\n")
        offset = len(head)
        head += _aligned_header(offset, self.data_bytes)
        self._members.append(_Member(_DATA, offset, self.data_bytes, 0, late=True))
        self.head = head

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.data_bytes + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """Return what follows the elements; `crc` is their CRC-32."""
        sizes = "<IIQQ" if self.data_bytes >= _LIMIT else "<IIII"
        late = struct.pack(sizes, 0x08074B50, crc, self.data_bytes, self.data_bytes)
        *small, data = self._members
        members = [*small, _Member(data.name, data.offset, data.size, crc, late=True)]
        return late + _directory(members, len(self.head) + self.data_bytes + len(late))


def value_archive(value: object) -> bytes:
    """Return the archive of a value that pickles from built-in types alone (numbers, strings, lists, dicts)."""
    members: list[_Member] = []
    body = _small(members, b"", _PICKLE, pickle.dumps(value, protocol=2))
    body = _small(members, body, _ORDER, b"little")
    body = _small(members, body, _FORMAT, b"3\n")
    return body + _directory(members, len(body))


def _tensor_pickle(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the pickle of a contiguous CPU tensor, opcode by opcode, as torch's pickler writes it."""
    if dtype in STORAGES:
        rebuild, storage = b"_rebuild_tensor_v2", b"ctorch\n" + STORAGES[dtype][0].encode() + b"\n"
        count, last = math.prod(shape), b""
    else:
        rebuild, storage = b"_rebuild_tensor_v3", b"ctorch.storage\nUntypedStorage\n"
        count, last = item_bytes(dtype) * math.prod(shape), b"ctorch\n" + dtype.encode() + b"\n"
    strides = [math.prod([max(1, n) for n in shape[i + 1 :]]) for i in range(len(shape))]
    held = b"(" + _plain("storage") + storage + _plain("0") + _plain("cpu") + _plain(count) + b"tQ"
    arguments = held + _plain(0) + _plain(tuple(shape)) + _plain(tuple(strides)) + b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n" + rebuild + b"\n(" + arguments + last + b"tR."


def _plain(value: object) -> bytes:
    """The pickle of a built-in value, without protocol mark and stop."""
    return pickle.dumps(value, protocol=2)[2:-1]


def _small(members: list[_Member], before: bytes, name: str, content: bytes) -> bytes:
    crc = zlib.crc32(content)
    members.append(_Member(name, len(before), len(content), crc))
    return before + _header(name, len(content), crc, 0) + name.encode() + content


def _header(name: str, size: int, crc: int, extra: int, *, late: bool = False) -> bytes:
    flags = _UTF8 | (_LATE_CRC if late else 0)
    shown = 0 if late else size
    return _LOCAL.pack(0x04034B50, _VERSION, flags, 0, 0, 0x21, crc, shown, shown, len(name.encode()), extra)


def _aligned_header(offset: int, size: int) -> bytes:
    """The header of the elements, padded by an extra field so that they begin at a multiple of ALIGNMENT."""
    wide = struct.pack("<HHQQ", 1, 16, 0, 0) if size >= _LIMIT else b""
    fixed = _LOCAL.size + len(_DATA) + len(wide) + 4
    padding = -(offset + fixed) % ALIGNMENT
    extra = wide + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    return _header(_DATA, size, 0, len(extra), late=True) + _DATA.encode() + extra


def _directory(members: Sequence[_Member], start: int) -> bytes:
    entries = b"".join(_entry(member) for member in members)
    count, size = len(members), len(entries)
    if start < _LIMIT:
        return entries + _END.pack(0x06054B50, 0, 0, count, count, size, start, 0)
    wide = _END64.pack(0x06064B50, 44, _VERSION, _VERSION, 0, 0, count, count, size, start)
    locator = _LOCATOR64.pack(0x07064B50, 0, start + size, 1)
    return entries + wide + locator + _END.pack(0x06054B50, 0, 0, count, count, size, _LIMIT, 0)


def _entry(member: _Member) -> bytes:
    name, flags = member.name.encode(), _UTF8 | (_LATE_CRC if member.late else 0)
    wide = struct.pack("<HHQQ", 1, 16, member.size, member.size) if member.size >= _LIMIT else b""
    shown, crc = min(member.size, _LIMIT), member.crc
    fixed = (0x02014B50, _VERSION, _VERSION, flags, 0, 0, 0x21, crc, shown, shown, len(name), len(wide))
    return _CENTRAL.pack(*fixed, 0, 0, 0, 0, member.offset) + name + wide
