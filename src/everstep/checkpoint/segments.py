"""Snapshot buffers as the agent holds them: memfds, allocated in full, that no worker can shrink.

A memfd has no name, no limit of a mount (a container's 64 MB of /dev/shm do not matter), and lives exactly as long
as its last holder: the agent. Without torch.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Mapping

from everstep.checkpoint.core.segment import Header, parse, step_of, unseal
from everstep.errors import MemoryShortage


class Segment:
    """One buffer."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.fd = os.memfd_create(f"everstep-snapshot-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._allocated = 0
        self._map: mmap.mmap | None = None

    def allocate(self, at_most: int) -> int:
        """Allocate up to `at_most` further bytes; return how many. MemoryShortage where the kernel has no more."""
        part = min(at_most, self.size - self._allocated)
        if part <= 0:
            return 0
        try:
            os.posix_fallocate(self.fd, self._allocated, part)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise MemoryShortage(
                    f"the kernel refused {part} bytes for snapshot buffer {self.name} after {self._allocated} of "
                    f"{self.size}: {error.strerror}. Free memory on this machine, or cap snapshots lower."
                ) from error
            raise
        self._allocated += part
        if self.ready:
            # Nobody can cut it: a mapping of it never ends in SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, self.size)
        return part

    @property
    def ready(self) -> bool:
        """True when every byte is there."""
        return self._allocated == self.size

    def header(self) -> Header | str:
        """Read it, or say why there is none."""
        if self._map is None:
            return "void: not allocated yet"
        with memoryview(self._map) as view:
            return parse(view)

    def step_hint(self) -> int:
        """Return the step that is sealed in it, unverified; 0 where there is none. It costs next to nothing."""
        if self._map is None:
            return 0
        with memoryview(self._map) as view:
            return step_of(view)

    def void(self) -> None:
        """Revoke what is in it. Nobody may be writing it."""
        if self._map is not None:
            with memoryview(self._map) as view:
                unseal(view)

    def close(self) -> None:
        """Let go; the memory is free when no worker maps it any more."""
        if self._map is not None:
            self._map.close()
        os.close(self.fd)


class SegmentSet:
    """The buffers of one rank that were asked for together."""

    def __init__(self, number: int, rank: int, size: int, buffers: range) -> None:
        self.number = number
        self.rank = rank
        self.size = size
        self.retired = False
        self.segments = {n: Segment(f"{rank}-{n}", size) for n in buffers}

    @classmethod
    def of(cls, number: int, rank: int, segments: Mapping[int, Segment]) -> "SegmentSet":
        """Make one of buffers that are there already, of one size; a negative number: they came from elsewhere."""
        made = cls(number, rank, next(iter(segments.values())).size, range(0))
        made.segments.update(segments)
        return made

    @property
    def lent(self) -> bool:
        """True where it holds copies that came from elsewhere, to be read alone."""
        return self.number < 0

    @property
    def bytes(self) -> int:
        """What it takes when it is allocated."""
        return self.size * len(self.segments)

    @property
    def ready(self) -> bool:
        """True when every byte is there."""
        return all(s.ready for s in self.segments.values())

    def allocate(self, at_most: int) -> int:
        """Allocate up to `at_most` further bytes; return how many."""
        done = 0
        for segment in self.segments.values():
            done += segment.allocate(at_most - done)
        return done

    def close(self) -> None:
        """Let go of all."""
        for segment in self.segments.values():
            segment.close()
