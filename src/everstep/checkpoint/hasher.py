"""The process that hashes snapshots nobody has read, when there is time; one beside a node's agent, or a keeper.

What the writer of a slower tier has read is hashed by it; in a job without one, and for what lies between two saves,
this leaves the checksum beside the seal, so that a restore from memory compares too (CASES CL-17).

It is a process so that the loop pays nothing: a thread of the worker would share its interpreter, and one of the agent
its loop. It has the least share of a processor that is wanted by others, works for a small part of the time
(core/idle.py), and shares no lock with anybody: a buffer that is taken for the next snapshot meanwhile is not hashed.

    watch {rank, buffers} + a descriptor of each       forget {rank, buffers}: their memory is to be freed
    end                                                the job has completed

Rule 1: it writes nothing but the checksum's words, and has only the page of the header mapped for writing.
Rule 2: a checksum is put beside the snapshot that was hashed or not at all: its words carry the whole header, so those
    of one that is written over at that instant are nobody's (core/segment.py).
"""

import mmap
import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from everstep.checkpoint.core import idle, segment
from everstep.clock import SYSTEM, Clock
from everstep.recovery.link import Link, LinkClosed

NICENESS = 19
"""Not SCHED_IDLE: beside a loop that keeps every processor busy, a process of that kind takes seconds even to end."""

PIECE = 4 << 20
"""Bytes hashed between two looks whether the snapshot is still there."""

Key = tuple[int, int]
"""Rank and buffer."""


def main(link: Link, *, training: Mapping[str, str] | None = None) -> None:
    """Entry of the process: serve until it is told to end, or the line closes."""
    del training  # what every helper of a keeper is told
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(NICENESS)
    Hasher(link).serve()


class _Mapped:
    def __init__(self, fd: int) -> None:
        self._maps = mmap.mmap(fd, segment.HEADER_BYTES), mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        self.head = memoryview(self._maps[0])  # the header's page, writable
        self.body = memoryview(self._maps[1])  # all of it

    def close(self) -> None:
        self.head.release()
        self.body.release()
        for each in self._maps:
            each.close()


class Hasher:
    """Hashes what it is told to watch."""

    def __init__(self, link: Link, clock: Clock = SYSTEM) -> None:
        self._link, self._clock = link, clock
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._watched: dict[Key, _Mapped] = {}
        self._rest_s = idle.LOOK_S

    def serve(self) -> None:
        """Hash and rest until the line closes."""
        while self.hear(self._rest_s):
            self.turn()

    def hear(self, timeout_s: float) -> bool:
        """Take what has been said, waiting so long at most; False when it is to end."""
        deadline = self._clock.now() + timeout_s
        while self._poll.poll(1000 * max(0.0, deadline - self._clock.now())):
            try:
                message, fds = self._link.receive()
            except LinkClosed:
                return False
            if message["kind"] == "end":
                return False
            self._heard(message, fds)
        return True

    def _heard(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        keys = [(int(message["rank"]), int(buffer)) for buffer in message["buffers"]]
        for key, fd in zip(keys, fds, strict=False):
            self._watched[key] = _Mapped(fd)
            os.close(fd)
        if message["kind"] == "forget":
            for key in keys:
                self._watched.pop(key).close()

    def turn(self) -> None:
        """Hash what is to be hashed, and reckon the rest after it."""
        began, done = self._clock.now(), True
        seen = [idle.Seen(*key, *segment.peek(mapped.head)) for key, mapped in self._watched.items()]
        for one in idle.wanted(seen):
            done = self._hash(self._watched[one.rank, one.buffer]) and done
            if self._poll.poll(0):
                break
        self._rest_s = idle.rest(self._rest_s, self._clock.now() - began, done=done)

    def _hash(self, mapped: _Mapped) -> bool:
        """Leave the checksum of what is in a buffer beside its seal; False where it was written over meanwhile."""
        header = segment.parse(mapped.body)
        if isinstance(header, str):
            return False
        digest = xxhash.xxh3_64()
        end = header.payload_offset + header.payload_bytes
        for start in range(header.payload_offset, end, PIECE):
            with mapped.body[start : min(start + PIECE, end)] as piece:
                digest.update(piece)
            if segment.peek(mapped.head)[0] != header.sequence or self._poll.poll(0):
                return False
        if segment.parse(mapped.body) != header:
            return False
        segment.put_checksum(mapped.head, header, digest.intdigest())
        return True
