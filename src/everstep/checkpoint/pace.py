"""Files that show a sign of life while they are written, and are made durable as they go.

An fsync of all that a shard has put into the page cache may be silent for as long as the whole write took: nobody can
tell it from storage that is stuck, and it is the one call during which a loss of power would cost all of it. So a file
is synced every so many bytes, as many as take about a second here, and each call that returns is a sign.
"""

from collections.abc import Callable

from everstep.checkpoint.fileops import Data, FileOps
from everstep.clock import SYSTEM, Clock

FIRST_BYTES = 16 << 20
LEAST_BYTES, MOST_BYTES = 4 << 20, 256 << 20
SHORT_S, LONG_S = 0.5, 2.0


class Paced:
    """`FileOps` over others; `moved` is called after each call that has to do with content."""

    def __init__(self, inner: FileOps, moved: Callable[[], None], clock: Clock = SYSTEM, *, syncs: bool = True) -> None:
        """`syncs`: whether a file may be synced before its end; an object may not."""
        self._inner, self._moved, self._clock, self._syncs = inner, moved, clock, syncs
        self._unsynced: dict[int, int] = {}
        self._every = FIRST_BYTES
        self.mkdir, self.fsync_dir, self.rename = inner.mkdir, inner.fsync_dir, inner.rename
        self.exchange, self.unlink, self.rmdir, self.listdir = inner.exchange, inner.unlink, inner.rmdir, inner.listdir

    def create(self, path: str) -> int:
        """See `FileOps.create`."""
        fd = self._inner.create(path)
        self._unsynced[fd] = 0
        return fd

    def write(self, fd: int, data: Data) -> int:
        """See `FileOps.write`."""
        count = self._inner.write(fd, data)
        self._moved()
        self._unsynced[fd] = self._unsynced.get(fd, 0) + count
        if self._syncs and self._unsynced[fd] >= self._every:
            began = self._clock.now()
            self.fsync(fd)
            self._every = _next(self._every, self._clock.now() - began)
        return count

    def fsync(self, fd: int) -> None:
        """See `FileOps.fsync`."""
        self._inner.fsync(fd)
        self._unsynced[fd] = 0
        self._moved()

    def close(self, fd: int) -> None:
        """See `FileOps.close`."""
        self._unsynced.pop(fd, None)
        self._inner.close(fd)


def _next(every: int, seconds: float) -> int:
    """Bytes between two syncs, after one that took so long."""
    if seconds < SHORT_S:
        return min(2 * every, MOST_BYTES)
    return max(every // 2, LEAST_BYTES) if seconds > LONG_S else every
