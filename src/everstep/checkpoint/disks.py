"""The directories that an agent's job writes to, made of what was asked for."""

from collections.abc import Sequence

from everstep.checkpoint.core.plan import Committed
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.flags import Place
from everstep.checkpoint.holder import Held
from everstep.checkpoint.shared_disk import SharedDisk
from everstep.checkpoint.shares import shares
from everstep.checkpoint.source import Source


def disks_of(places: Sequence[Place], shelf: Source, grace_s: float, *, several: bool = False) -> list[Disk]:
    """Return one for each place, in the order in which they start; of two the second is the nearer, and the lesser.

    `several`: the job has other nodes, which share the one place there is.
    """
    if several:
        return [
            SharedDisk(
                one.directory, one.interval, shelf, one.keep, hold=Held(one.directory, several=True), grace_s=grace_s
            )
            for one in places
        ]
    made: list[Disk] = []
    for place, share in zip(places, shares(shelf, len(places)), strict=True):
        made.append(
            Disk(
                place.directory, place.interval, share, place.keep, place.tier, hold=Held(place.directory),
                grace_s=grace_s, behind=made[0] if made else None,
            )
        )  # fmt: skip
    return made


def nearest_first(disks: Sequence[Disk]) -> list[Committed]:
    """Return what is whole in any of them; of equal steps the nearer one comes first, and is taken."""
    return [one for disk in reversed(disks) for one in disk.committed()]
