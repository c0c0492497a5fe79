"""Memory that a trainer fills and its worker reads: one memfd for a whole save, whatever the number of tensors.

Rule 1: it is allocated in full before a byte is copied, so that too little memory is an error with both numbers and
never a SIGBUS (CASES CS-13); /dev/shm is not used.
Rule 2: one that is free again serves the next save (CS-03); at most one free one is kept.
No torch here.
"""

import errno
import mmap
import os
from collections.abc import Callable

from everstep.checkpoint import memory
from everstep.checkpoint.core.budget import size as in_words
from everstep.errors import MemoryShortage

ALIGNMENT = 64
_PAGE = 2 << 20
_ANEW = 4  # a free one that is so many times too large is given back


def aligned(count: int) -> int:
    """Return `count` rounded up to where the next tensor may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Region:
    """One memfd, allocated and mapped."""

    def __init__(self, size: int, map_: mmap.mmap, fd: int) -> None:
        self.size, self.map, self.fd = size, map_, fd
        self.unlock: Callable[[], None] | None = None  # set where it is page-locked for a device

    @classmethod
    def allocate(cls, count: int) -> "Region":
        """Make one of at least `count` bytes. Raises MemoryShortage: how much is needed, how much is free."""
        size = max(_PAGE, -(-count // _PAGE) * _PAGE)
        found = memory.read()
        free = min(found.available or size, found.available if found.group_free is None else found.group_free)
        if size > free:
            raise MemoryShortage(_short(size, free))
        fd = os.memfd_create("everstep-save", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(size, mmap.mmap(fd, size), fd)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise MemoryShortage(_short(size, free)) from error
            raise

    def close(self) -> None:
        """Let go of it; its memory is free with the last view of it. Twice does no harm."""
        if self.unlock is not None:
            self.unlock()
            self.unlock = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _short(size: int, free: int) -> str:
    return (
        f"a save in the background needs {in_words(size)} of host memory for its copy of the state, and this machine "
        f"and this process's group leave {in_words(free)}. Free memory, wait for the last save before the next one, "
        "or save synchronously."
    )


class Pool:
    """The regions of one caller. Used on the thread that saves."""

    def __init__(self) -> None:
        self._free: list[Region] = []

    def take(self, count: int) -> Region:
        """Return a region of at least `count` bytes: the free one, if it fits, else a new one."""
        while self._free:
            region = self._free.pop()
            if count <= region.size <= max(_PAGE, _ANEW * count):
                return region
            region.close()
        return Region.allocate(count)

    def give(self, region: Region) -> None:
        """Take one back; nobody reads it any more."""
        if self._free or region.fd < 0:
            region.close()
        else:
            self._free.append(region)

    def clear(self) -> None:
        """Give the memory back to the system."""
        while self._free:
            self._free.pop().close()
