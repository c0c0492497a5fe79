"""Takes stock of a checkpoint directory at a job's start: all that lies there, and the newest that is whole.

The newest is read in full against its checksums, and the next while one is damaged. Where one cannot be read now,
nobody looks further: it may be whole, and what is older is not taken for it.
"""

from collections.abc import Callable, Sequence

from everstep.checkpoint import catalog
from everstep.checkpoint.core.findings import Findings, Hurt, Known
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.opening import Opening
from everstep.checkpoint.unreachable import Retry, deadline_s
from everstep.clock import SYSTEM, Clock


def take_stock(
    directory: str,
    told: Sequence[str],
    moving: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM,
    limit_s: float | None = None,
) -> Findings:
    """Look at `directory`; `moving` is called whenever it has answered, or not.

    limit_s: seconds for which a call that fails is made again; None: as long as one may take (`deadline_s`).

    UsageError where it is none, UnreachableStorage where it cannot be listed for as long as a call may take.
    """
    retry = Retry(deadline_s() if limit_s is None else limit_s, moving, clock)
    return stock_of(catalog.scan(directory, retry), told, retry)


def stock_of(
    found: Sequence[catalog.Found], told: Sequence[str], retry: Retry, through: Opening = opening.reading
) -> Findings:
    """Read what is listed, until one is whole, or cannot be read."""
    newest, wounds = catalog.newest(found, retry, through)
    unread = {newest.step} if newest is not None and any(wound.step == newest.step for wound in wounds) else set[int]()
    hurt = tuple(Hurt(wound.step, wound.file, wound.reason) for wound in wounds if wound.step not in unread)
    away = tuple(Hurt(wound.step, wound.file, wound.reason) for wound in wounds if wound.step in unread)
    return Findings(
        tuple(told), tuple(_known(one, one.unread or one.step in unread) for one in found), hurt, unread=away
    )


def _known(found: catalog.Found, unread: bool) -> Known:
    manifest = found.manifest
    if manifest is None:
        return Known(found.step, False, None, unread=unread)
    return Known(found.step, found.complete, manifest.world_size, manifest.metrics, found.changed_s, unread)
