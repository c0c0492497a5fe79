"""Takes stock of a checkpoint directory at a job's start: all that lies there, and the newest that is whole.

The newest is read in full against its checksums, and the next while one is damaged.
"""

from collections.abc import Callable, Sequence

from everstep.checkpoint import catalog
from everstep.checkpoint.core.findings import Findings, Hurt, Known


def take_stock(directory: str, told: Sequence[str], moving: Callable[[], None] = lambda: None) -> Findings:
    """Look at `directory`; `moving` is called whenever it has answered. UsageError where it cannot be listed."""
    found = catalog.scan(directory)
    moving()
    _, wounds = catalog.newest_whole(directory, moving=moving)
    hurt = tuple(Hurt(wound.step, wound.file, wound.reason) for wound in wounds)
    return Findings(tuple(told), tuple(map(_known, found)), hurt)


def _known(found: catalog.Found) -> Known:
    manifest = found.manifest
    if manifest is None:
        return Known(found.step, found.complete, None)
    return Known(found.step, found.complete, manifest.world_size, manifest.metrics, found.changed_s)
