"""One snapshot buffer: a header, the payload, the description; readable and verifiable without torch.

    0            4096                          meta_offset
    ┌────────────┬─────────────────────────────┬──────────────┬ ─ ─ ─ ─
    │ header     │ payload (tensors)           │ meta (JSON)  │ unused
    └────────────┴─────────────────────────────┴──────────────┴ ─ ─ ─ ─

Rule 1: void unless sealed. The two seal words carry the sequence number, plain and inverted; they are cleared before
    the first byte of a new snapshot is written and set after the last, so a kill at any instant leaves a void buffer.
Rule 2: the seal is trusted for the payload (EXPERIMENTS M7: no hashing in the loop; the page cache outlives a killed
    process whole); a checksum covers header and meta, since a reader acts on what they say.
Rule 3: every snapshot says its lineage: the epoch and generation that made it and the step that generation began
    from (-1: from the beginning). Snapshots of two lineages are never combined.
    Whoever reads the whole payload first (a writer, an idle pass) leaves its checksum beside the seal: from then on
    the copy is hashed, and a restore compares it (CL-17). Nobody waits for it: it may come when the buffer is another
    snapshot's by now, and says of which header it is, so that it is none of that one's.
Rule 4: `parse` never raises: it returns a header, or the reason why there is none.
"""

import struct
import zlib
from dataclasses import dataclass

import xxhash

from everstep.checkpoint.core.layout import align

MAGIC = b"EVERSNAP"
VERSION = 1
HEADER_BYTES = 4096
FROM_THE_BEGINNING = -1

_MAGIC = struct.Struct("<8s")
_WORD = struct.Struct("<Q")
_BODY = struct.Struct("<IIQqqqqIIQQQQ")
_CHECKSUM = struct.Struct("<I")
_SEAL_AT = 8
_INVERTED_AT = 16
_BODY_AT = 24
_CHECKSUM_AT = _BODY_AT + _BODY.size
_HASHED_AT = 512
_DIGEST = struct.Struct("<QQ")
_DIGEST_AT = _HASHED_AT + _WORD.size
_ALL_ONES = 2**64 - 1
_PIECE = 8 << 20  # hashed at a time, so that other threads come to their turn

Writable = bytearray | memoryview
Readable = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """What a sealed buffer says of itself."""

    sequence: int  # of this rank's snapshots, counted from 1 over all generations
    step: int  # last step done in this state
    epoch: int
    generation: int
    parent: int  # the step that its generation began from; FROM_THE_BEGINNING: none
    rank: int
    world_size: int
    payload_bytes: int
    meta_bytes: int
    payload_offset: int = HEADER_BYTES
    meta_offset: int = 0

    @property
    def lineage(self) -> tuple[int, int, int]:
        """(epoch, generation, parent)."""
        return self.epoch, self.generation, self.parent


def needed_bytes(payload_bytes: int, meta_bytes: int) -> int:
    """Return the size of a buffer that holds so much."""
    return align(HEADER_BYTES + payload_bytes) + meta_bytes


def unseal(buffer: Writable) -> None:
    """Make the buffer void: first thing before anything of a new snapshot is written, and to revoke one."""
    _WORD.pack_into(buffer, _SEAL_AT, 0)
    _WORD.pack_into(buffer, _INVERTED_AT, 0)
    _WORD.pack_into(buffer, _HASHED_AT, 0)


def write(buffer: Writable, header: Header, meta: bytes) -> None:
    """Write header and meta of a void buffer, its places filled in. Does not seal.

    Raises ValueError where the buffer is too small: nothing is written then.
    """
    view = memoryview(buffer)
    needed = needed_bytes(header.payload_bytes, len(meta))
    if needed > len(view):
        raise ValueError(f"a snapshot of {needed} bytes does not fit a buffer of {len(view)}; ask for a larger one")
    start = align(HEADER_BYTES + header.payload_bytes)
    body = _packed(header, start, len(meta))
    view[start : start + len(meta)] = meta
    _MAGIC.pack_into(view, 0, MAGIC)
    view[_BODY_AT:_CHECKSUM_AT] = body
    _CHECKSUM.pack_into(view, _CHECKSUM_AT, _checksum(body, meta))


def seal(buffer: Writable, sequence: int) -> None:
    """Declare the buffer whole: the last thing, after payload, header and meta."""
    _WORD.pack_into(buffer, _INVERTED_AT, sequence ^ _ALL_ONES)
    _WORD.pack_into(buffer, _SEAL_AT, sequence)


def peek(buffer: Writable) -> tuple[int, bool]:
    """Return the sequence of what is sealed (0: nothing is, as far as the seal says), and whether it is hashed.

    A glance at a few words: `parse` verifies, and `checksum_of`.
    """
    (sealed,) = _WORD.unpack_from(buffer, _SEAL_AT)
    (inverted,) = _WORD.unpack_from(buffer, _INVERTED_AT)
    (hashed,) = _WORD.unpack_from(buffer, _HASHED_AT)
    return (sealed, hashed == sealed) if inverted == sealed ^ _ALL_ONES else (0, False)


def put_checksum(buffer: Writable, header: Header, checksum: int) -> None:
    """Leave the payload's checksum (xxh3) beside the seal of the snapshot with that header."""
    _DIGEST.pack_into(buffer, _DIGEST_AT, checksum, checksum ^ _mark(header))
    _WORD.pack_into(buffer, _HASHED_AT, header.sequence)


def checksum_of(buffer: Readable, header: Header) -> int | None:
    """Return the payload's checksum; None where the copy is only sealed. A torn one, or another snapshot's, is none."""
    (sequence,) = _WORD.unpack_from(buffer, _HASHED_AT)
    if sequence != header.sequence:
        return None
    checksum, guard = _DIGEST.unpack_from(buffer, _DIGEST_AT)
    return checksum if guard == checksum ^ _mark(header) else None


def _mark(header: Header) -> int:
    """Of two snapshots of one sequence (the second after a rollback) the lineage differs, and with it this number."""
    return xxhash.xxh3_64_intdigest(_packed(header, header.meta_offset, header.meta_bytes))


def _packed(header: Header, meta_offset: int, meta_bytes: int) -> bytes:
    return _BODY.pack(
        VERSION, HEADER_BYTES, header.sequence, header.step, header.epoch, header.generation, header.parent,
        header.rank, header.world_size, HEADER_BYTES, header.payload_bytes, meta_offset, meta_bytes,
    )  # fmt: skip


def checksum(buffer: Readable, header: Header) -> int:
    """Compute the payload's checksum."""
    digest = xxhash.xxh3_64()
    end = header.payload_offset + header.payload_bytes
    with memoryview(buffer) as view:
        for start in range(header.payload_offset, end, _PIECE):
            with view[start : min(end, start + _PIECE)] as piece:
                digest.update(piece)
    return int(digest.intdigest())


def wound(buffer: Readable, header: Header) -> str:
    """Say what is wrong with the payload of a hashed copy; nothing where it matches, or is only sealed."""
    expected = checksum_of(buffer, header)
    if expected is None:
        return ""
    found = checksum(buffer, header)
    if found == expected:
        return ""
    return f"damaged: its payload has checksum {found:016x}, not {expected:016x}: bytes were changed in memory"


def complete(buffer: Writable, head: bytes) -> Header | str:
    """Put the head of a copy whose other bytes have arrived before it, and seal it where all matches; else say why not.

    `head` is the whole header area of the original, which was hashed. What does not match is left void.
    """
    with memoryview(buffer) as view:
        view[_BODY_AT:HEADER_BYTES] = head[_BODY_AT:HEADER_BYTES]
        view[:_SEAL_AT] = head[:_SEAL_AT]
        view[_SEAL_AT:_BODY_AT] = head[_SEAL_AT:_BODY_AT]
        header = parse(view)
        why = header if isinstance(header, str) else wound(view, header)
        if not why and isinstance(header, Header) and checksum_of(view, header) is None:
            why = "only sealed: a copy that is sent has a checksum"
        if not why:
            return header
        unseal(view)
        return why


def step_of(buffer: Readable) -> int:
    """Return the step of a sealed buffer, without a look whether its header is whole; 0 where it is void."""
    (sealed,) = _WORD.unpack_from(buffer, _SEAL_AT)
    (inverted,) = _WORD.unpack_from(buffer, _INVERTED_AT)
    return int(_BODY.unpack_from(buffer, _BODY_AT)[3]) if sealed and inverted == sealed ^ _ALL_ONES else 0


def claimed(head: Readable) -> Header | None:
    """Return what a header area says, unverified: its description may not be there yet. None for what is none of ours.

    Whoever acts on it holds it against what there is.
    """
    fields = _BODY.unpack_from(head, _BODY_AT)
    ours = bytes(head[:_SEAL_AT]) == MAGIC and fields[:2] == (VERSION, HEADER_BYTES)
    return _header(fields) if ours else None


def parse(buffer: Readable) -> Header | str:
    """Return the header of a sealed and undamaged buffer, else why there is none."""
    with memoryview(buffer) as view:
        if len(view) < HEADER_BYTES:
            return f"only {len(view)} bytes, less than a header"
        (sealed,) = _WORD.unpack_from(view, _SEAL_AT)
        (inverted,) = _WORD.unpack_from(view, _INVERTED_AT)
        if sealed == 0:
            return "void: not sealed"
        if bytes(view[:8]) != MAGIC:
            return "damaged: not a snapshot buffer"
        if inverted != sealed ^ _ALL_ONES:
            return "void: torn while it was sealed or unsealed"
        body = bytes(view[_BODY_AT:_CHECKSUM_AT])
        return _verified(_BODY.unpack(body), sealed, body, view)


def _verified(fields: tuple[int, ...], sealed: int, body: bytes, view: memoryview) -> Header | str:
    header = _header(fields)
    if fields[:2] != (VERSION, HEADER_BYTES):
        return f"damaged: version {fields[0]} with a header of {fields[1]} bytes, not {VERSION} with {HEADER_BYTES}"
    end = header.meta_offset + header.meta_bytes
    if header.payload_offset + header.payload_bytes > header.meta_offset or end > len(view):
        return f"damaged: its parts end at {end}, beyond its {len(view)} bytes, or overlap"
    if header.sequence != sealed:
        return f"damaged: sealed as snapshot {sealed}, written as {header.sequence}"
    with view[header.meta_offset : end] as meta:
        if _CHECKSUM.unpack_from(view, _CHECKSUM_AT)[0] != _checksum(body, meta):
            return "damaged: header and description do not match their checksum"
    return header


def _header(fields: tuple[int, ...]) -> Header:
    _, _, sequence, step, epoch, generation, parent, rank, world, payload_at, payload, meta_at, meta = fields
    return Header(sequence, step, epoch, generation, parent, rank, world, payload, meta, payload_at, meta_at)


def _checksum(body: bytes, meta: Readable) -> int:
    return zlib.crc32(meta, zlib.crc32(body))
