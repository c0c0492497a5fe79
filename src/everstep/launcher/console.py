"""A worker's own stdout and stderr: as unbuffered as torchrun's, and never a reason to fail.

A reader that has gone (`| head -1`) or a full disk loses what is printed, not the training (LA-23, LA-25).
"""

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Unfailing(io.FileIO):
    """A raw stream on a descriptor; what it cannot write is taken for written."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of `data`, or as much as can be."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError:
            return size
        return size


def renew() -> None:
    """Give this process new standard streams on descriptors 1 and 2, as `python -u` makes them."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name, None)
        raw = Unfailing(fd, "wb", closefd=False)  # raw, as the interpreter's own under -u
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            raw,
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors=getattr(old, "errors", None) or "backslashreplace",
            write_through=True,
        )
        stream.mode = "w"  # type: ignore[misc] # the interpreter's own have it too
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
