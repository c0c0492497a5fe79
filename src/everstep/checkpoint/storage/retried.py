"""Reads of a checkpoint that are made again while the place does not answer (`unreachable.Retry`)."""

from everstep.checkpoint.storage.api import Reading
from everstep.checkpoint.unreachable import Retry


class RetriedReading:
    """A `Reading` by way of another."""

    def __init__(self, inner: Reading, retry: Retry) -> None:
        self._inner, self._retry = inner, retry

    def manifest(self) -> bytes:
        """See `Reading.manifest`."""
        return self._retry(self._inner.manifest)

    def size(self, name: str) -> int | None:
        """See `Reading.size`."""
        return self._retry(lambda: self._inner.size(name))

    def read_into(self, name: str, into: memoryview, offset: int) -> int:
        """See `Reading.read_into`."""
        return self._retry(lambda: self._inner.read_into(name, into, offset))

    def close(self) -> None:
        """See `Reading.close`."""
        self._inner.close()
