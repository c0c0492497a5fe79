"""Which training a place's checkpoints are of: so that a directory of a node is not taken for another training's.

A job that writes to two places begins from whichever has the newer state. That is right only where both are of one
training: a node's own directory that an earlier, other training has left behind holds steps that this one never did.
So the first place has a name of its own in it, made once and kept with it, and the second belongs to whoever's name
stands there.
"""

import os
import re
import secrets

from everstep.checkpoint.core import names
from everstep.checkpoint.fileops import FileOps, PosixFiles, put
from everstep.checkpoint.storage.fsspec_bucket import connect
from everstep.checkpoint.storage.opening import is_url, open_storage
from everstep.checkpoint.unreachable import ONCE, Retry

MAKE = ""
"""Asked for: the place's own name, whichever it is; one is made where it has none."""
UNNAMED = "unnamed"
"""Of a place that holds steps, and no name."""
_NAME = re.compile(rb"[0-9a-f]{16}\n\Z")


def settle(directory: str, wanted: str, job: str, files: FileOps | None = None, retry: Retry = ONCE) -> str:
    """Return the name of the training that `directory` belongs to; one that has none and is empty gets `wanted`.

    For who holds the directory. Where it is another than `wanted`, nothing was changed. `retry`: how long what cannot
    be read is asked for again; then its OSError.
    """
    own = retry(lambda: _read(directory))
    if own and wanted in (own, MAKE):
        return own
    if wanted != MAKE and (own or open_storage(directory, files, retry).scan()):
        return own or UNNAMED
    name = wanted or secrets.token_hex(8)
    _write(directory, name, job, files or PosixFiles())
    return name


def strangers(directory: str, first: str) -> str:
    """Say what it means that `directory` belongs to another training than `first`, and what to do."""
    return (
        f"the checkpoints in {directory} are of another training than those in {first}: taking them up would go on "
        "with somebody else's state. Nothing was changed there. To go on from them all the same (where what was in "
        f"{first} is lost), give their directory alone; for a new training empty it, or give another local directory"
    )


def _read(directory: str) -> str:
    try:
        if is_url(directory):
            content = connect(directory).get(names.SERIES)
        else:
            with open(os.path.join(directory, names.SERIES), "rb") as file:
                content = file.read()
    except FileNotFoundError:
        return ""
    return content.decode().strip() if _NAME.match(content) else ""


def _write(directory: str, name: str, job: str, files: FileOps) -> None:
    content = f"{name}\n".encode()
    if is_url(directory):
        connect(directory).put(names.SERIES, content)
        return
    partial = os.path.join(directory, names.probe(job))  # what a kill leaves of it is swept by the next start
    put(files, partial, content)
    files.rename(partial, os.path.join(directory, names.SERIES))
    files.fsync_dir(directory)
