"""Looks, in a process of its own, whether a directory is the one that the leading keeper has taken.

A directory of the same name on another host may be another directory, on a disk of its own: what is saved there would
be half a checkpoint. What tells is the owner file that the leading keeper's holder has made, or the owner's object.

    keeper ◀─ seen {text}        nothing, or why it is not
"""

import os
from collections.abc import Callable, Sequence

from everstep.checkpoint.core import names
from everstep.checkpoint.directory import share
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.fsspec_bucket import connect
from everstep.checkpoint.storage.owner import read_owner
from everstep.checkpoint.visible import LATE, LOOK_S
from everstep.clock import SYSTEM, Clock
from everstep.recovery.link import Link

ENTRY = "everstep.checkpoint.place_seen:main"


def main(link: Link, *, places: Sequence[Sequence[str]], limit_s: float, training: object = None) -> None:
    """Entry of the process. `places`: directory or URL, and the job that has it."""
    del training
    try:
        text = "; ".join(filter(None, (unseen(where, job, limit_s) for where, job in places)))
    except Exception as error:  # noqa: BLE001 - a client library of a store raises what it likes
        text = f"the checkpoint storage cannot be used: {type(error).__name__}: {error}"
    link.send({"kind": "seen", "text": text})
    os._exit(0)


def unseen(place: str, job: str, limit_s: float, clock: Clock = SYSTEM, look: Callable[[str], int] = share) -> str:
    """Return nothing where the owner file of `job` is there within `limit_s`, else what is wrong, and what mends it."""
    if opening.is_url(place):
        found = read_owner(connect(place)).get("job")
        return "" if found == job else f"{place} is another store than that of the leading host: another has it there"
    path, deadline = os.path.join(place, names.owner(job)), clock.now() + limit_s
    while True:
        try:
            os.close(look(path))
        except OSError as error:
            if error.errno not in LATE:
                return f"{path} cannot be read or locked: {error.strerror}"
        else:
            return ""
        if clock.now() >= deadline:
            return (
                f"{path}, which the leading host has written, is not seen after {limit_s:.0f} s: {place} is another "
                "directory here. Give the Checkpointer a directory that all hosts share, or the URL of an object store"
            )
        clock.sleep(LOOK_S)
