"""Waits until a checkpoint that another node has published is there for this one.

A network file system may go on showing a directory as it was for up to a minute (nfs(5): acdirmax, negative lookups).
That it is there is known from who published it; what this node sees is no news (CASES CL-05).
"""

import errno
import os
from collections.abc import Callable

from everstep.checkpoint.core import names
from everstep.checkpoint.storage.opening import Opening, is_url
from everstep.clock import SYSTEM, Clock
from everstep.telemetry import say

LIMIT_S = 90.0
LOOK_S = 0.5
LATE = (errno.ENOENT, errno.ESTALE)


def wait(path: str, limit_s: float = LIMIT_S, clock: Clock = SYSTEM, look: Callable[[str], object] = os.stat) -> bool:
    """Return True when the checkpoint at `path` can be seen, by exact name; False after `limit_s` seconds.

    `look` raises OSError for what is not there, as `seen_through` does, which lets another process look.
    """
    if is_url(path):
        return True  # an object store shows what was created
    manifest = os.path.join(path, names.MANIFEST)
    deadline, told = clock.now() + limit_s, False
    while not _seen(manifest, look):
        if clock.now() >= deadline:
            return False
        if not told:
            told = True
            say(f"{path} is not seen on this node yet; waiting for the file system, {limit_s:.0f} s at most")
        clock.sleep(LOOK_S)
    return True


def seen_through(through: Opening) -> Callable[[str], object]:
    """Return what looks for a checkpoint's manifest by way of `through`."""

    def look(manifest: str) -> None:
        source = through(os.path.dirname(manifest))
        try:
            if source.size(os.path.basename(manifest)) is None:
                raise FileNotFoundError(errno.ENOENT, "No such file", manifest)
        finally:
            source.close()

    return look


def _seen(manifest: str, look: Callable[[str], object]) -> bool:
    try:
        look(manifest)
    except OSError as error:
        return error.errno not in LATE  # else something other is wrong with it: whoever reads it says what
    return True
