"""How one snapshot goes from porter to porter: what is said on the line, by either side.

 sender                                                                            receiver
    the header, the description ─────────────────────────────────────────────────▶  what of it do snapshots here hold?
    ◀──────────────────────── the ranges that are wanted ────────────────────────  the rest is copied from them
    those, sendfile from the buffer itself ──────────────────────────────────────▶  into the memory that it was given
    ◀──────────────────────── all of it, where the whole does not match ─────────  hash, compare
    ◀──────────────────────── kept, or why not ──────────────────────────────────  seal

What DDP and HSDP have on several nodes is not sent (EXPERIMENTS M10, core/alike.py); the copy is whole all the same.

Rule 1: memory that a copy goes into is void until the last byte has been verified.
Rule 2: every wait has an end: a peer that says nothing for `SILENCE_S` is gone.
Rule 3: what either side says is held against what it may say: it comes over a network.
"""

import contextlib
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.alike import LEAST, Range, alike, lacking, shared
from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.segment import HEADER_BYTES, Header
from everstep.clock import SYSTEM, Clock
from everstep.errors import DamagedCheckpoint

SILENCE_S = 15.0
CHUNK = 8 << 20
SOURCES = 4
"""So many snapshots at most are looked through for what need not be sent."""
MOST_RANGES = 1 << 20
ROUNDS = 2
_WORD = struct.Struct("<cI")
_WANT, _ANSWER = b"W", b"A"
_RANGE = struct.Struct("<QQ")
_TEXT = 4096


class NotCarried(Exception):
    """A transfer has come to nothing; the text says why."""


class Gone(NotCarried):
    """The other side has gone in its midst: nothing is known against the copy."""


@dataclass(frozen=True, slots=True)
class Had:
    """A part of the snapshot that another one here holds."""

    begin: int
    end: int
    of: memoryview
    source: int


def take(line: socket.socket, fd: int, length: int, sources: Sequence[int] = (), least: int = LEAST) -> int:
    """Receive one copy into memory, and verify it; return how many bytes came. Void before, void after a failure.

    `sources`: descriptors of snapshots here that may hold parts of it. NotCarried, OSError or ValueError say why not.
    """
    line.settimeout(SILENCE_S)
    with mmap.mmap(fd, 0) as memory, memoryview(memory) as view, contextlib.ExitStack() as open_:
        segment.unseal(view)
        if not HEADER_BYTES <= length <= len(view):
            raise NotCarried(f"{length} bytes are announced, for memory of {len(view)}")
        head = exactly(line, HEADER_BYTES)
        header = _claimed(head, length)
        _into(line, view, header.meta_offset, length)
        came = HEADER_BYTES + header.meta_bytes
        had = held_here(view, header, sources, least, open_)
        for part in had:
            view[part.begin : part.end] = part.of[part.source : part.source + part.end - part.begin]
        came += _have(line, view, lacking([(p.begin, p.end) for p in had], HEADER_BYTES, header.meta_offset))
        found = segment.complete(view, head)
        if isinstance(found, str) and had:
            came += _have(line, view, [(HEADER_BYTES, header.meta_offset)])
            found = segment.complete(view, head)
        if isinstance(found, str):
            raise NotCarried(found)
        return came


def answer(line: socket.socket, why: str) -> None:
    """Tell the sender that it is kept, or why not."""
    text = why.encode()[:_TEXT]
    line.sendall(_WORD.pack(_ANSWER, len(text)) + text)


def give(line: socket.socket, fd: int, length: int) -> int:
    """Send one snapshot of so many bytes; return how many went. NotCarried with what the receiver says against it."""
    header = _claimed(os.pread(fd, HEADER_BYTES, 0), length)
    went = _send(line, fd, [(0, HEADER_BYTES), (header.meta_offset, length)])
    for _ in range(ROUNDS + 1):
        kind, count = _WORD.unpack(exactly(line, _WORD.size))
        if kind == _ANSWER:
            refusal = exactly(line, min(count, _TEXT)).decode(errors="replace")
            if refusal:
                raise NotCarried(f"the receiver refuses it: {refusal}")
            return went
        went += _send(line, fd, _wanted(line, count, header.meta_offset))
    raise NotCarried("the receiver wants it again and again")


def exactly(line: socket.socket, count: int, deadline: float | None = None, clock: Clock = SYSTEM) -> bytes:
    """Receive so many bytes; by a deadline also from somebody who sends one at a time."""
    found = bytearray()
    while len(found) < count:
        if deadline is not None:
            line.settimeout(max(0.001, deadline - clock.now()))
        piece = line.recv(count - len(found))
        if not piece:
            raise Gone(f"the other side has gone after {len(found)} of {count} bytes")
        found += piece
    return bytes(found)


def _claimed(head: bytes, length: int) -> Header:
    """Return what a head says; its parts lie in `length` bytes. It is verified when all is there."""
    header = segment.claimed(head)
    if header is None:
        raise NotCarried("damaged: not a snapshot buffer")
    end = header.meta_offset + header.meta_bytes
    if end != length:
        raise NotCarried(f"{length} bytes came, where its header says {end}")
    if not HEADER_BYTES <= header.payload_offset + header.payload_bytes <= header.meta_offset:
        raise NotCarried(f"its header says {header}, which cannot be")
    return header


def held_here(
    view: memoryview, header: Header, sources: Sequence[int], least: int, open_: contextlib.ExitStack
) -> list[Had]:
    """Return what snapshots here hold of one whose description is in `view`, sorted; `open_` lets them go."""
    mine = _described(view, header) if sources else None
    if mine is None:
        return []  # where its description is damaged, the whole will not match either, and is told of
    found: dict[int, Had] = {}
    sought = len(shared(mine, least))
    for fd in sources[:SOURCES]:
        known = open_.enter_context(memoryview(open_.enter_context(mmap.mmap(fd, 0, prot=mmap.PROT_READ))))
        for had in _held_in(known, header, mine, least) if len(found) < sought else ():
            found.setdefault(had.begin, had)
    return [found[begin] for begin in sorted(found)]


def _held_in(known: memoryview, header: Header, mine: Layout, least: int) -> Iterator[Had]:
    other = segment.parse(known)
    if isinstance(other, str) or (other.step, *other.lineage) != (header.step, *header.lineage):
        return
    theirs = _described(known, other)
    for run in alike(mine, theirs, least) if theirs is not None else ():
        begin, source = header.payload_offset + run.at, other.payload_offset + run.source
        if begin + run.size <= header.meta_offset and source + run.size <= other.meta_offset:
            yield Had(begin, begin + run.size, known, source)


def _described(view: memoryview, header: Header) -> Layout | None:
    try:
        return Layout.from_json(bytes(view[header.meta_offset : header.meta_offset + header.meta_bytes]))
    except DamagedCheckpoint:
        return None


def _have(line: socket.socket, view: memoryview, ranges: Sequence[Range]) -> int:
    """Ask for these ranges, and take them."""
    if not ranges:
        return 0
    line.sendall(_WORD.pack(_WANT, len(ranges)) + b"".join(_RANGE.pack(*one) for one in ranges))
    for begin, end in ranges:
        _into(line, view, begin, end)
    return sum(end - begin for begin, end in ranges)


def _into(line: socket.socket, view: memoryview, begin: int, end: int) -> None:
    done = begin
    while done < end:
        got = line.recv_into(view[done : min(end, done + CHUNK)])
        if not got:
            raise Gone(f"the sender has gone at byte {done} of {end}")
        done += got


def _wanted(line: socket.socket, count: int, end: int) -> list[Range]:
    """Read what the receiver asks for; NotCarried for what it cannot ask for."""
    if count > MOST_RANGES:
        raise NotCarried(f"the receiver wants {count} ranges")
    text = exactly(line, count * _RANGE.size)
    ranges = [_RANGE.unpack_from(text, at) for at in range(0, len(text), _RANGE.size)]
    before = HEADER_BYTES
    for first, last in ranges:
        if not before <= first < last <= end:
            raise NotCarried(f"the receiver wants bytes {first} to {last} of {end}")
        before = last
    return [(first, last) for first, last in ranges]


def _send(line: socket.socket, fd: int, ranges: Sequence[Range]) -> int:
    """Send from the buffer itself: no copy of it passes through this process."""
    line.setblocking(False)
    room = select.poll()
    room.register(line, select.POLLOUT)
    for begin, end in ranges:
        done = begin
        while done < end:
            if not room.poll(SILENCE_S * 1000):
                raise Gone(f"the receiver has taken nothing for {SILENCE_S:.0f} s, at byte {done} of {end}")
            with contextlib.suppress(BlockingIOError):
                sent = os.sendfile(line.fileno(), fd, done, min(CHUNK, end - done))
                if not sent:
                    raise NotCarried(f"the buffer ends after {done} of {end} bytes")
                done += sent
    line.settimeout(SILENCE_S)
    return sum(end - begin for begin, end in ranges)
