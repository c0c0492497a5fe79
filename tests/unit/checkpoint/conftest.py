"""One agent's shelf and its workers' snapshotters, in this process."""

import pytest

from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.testing.loopback import LoopbackHost


class Bench:
    """`world_size` ranks; each generation's ranks are the survivors but for those in `replace`."""

    def __init__(self, world_size: int = 1, **shelf) -> None:
        shelf.setdefault("look", lambda: Memory(8 << 30))
        self.shelf = Shelf(**shelf)
        self.host = LoopbackHost(self.shelf, world_size)
        self.ranks: dict[int, Snapshotter] = {}
        self.told: dict[int, dict] = {}

    def worker(self, rank: int) -> Snapshotter:
        snapshotter = Snapshotter(self.host.from_worker(rank), deadline_s=1.0)
        self.host.receivers[rank] = snapshotter.on_message
        self.ranks[rank] = snapshotter
        return snapshotter

    def enter(self, replace=(), world_size=None) -> list[Snapshotter]:
        for rank, old in list(self.ranks.items()):
            old.settle()
            if rank in replace:
                old.close()
                del self.ranks[rank]
        self.told = dict(self.host.enter(world_size))
        for rank in range(self.host.world_size):
            snapshotter = self.ranks.get(rank) or self.worker(rank)
            snapshotter.begin(rank, self.host.world_size, self.told[rank])
        return [self.ranks[rank] for rank in range(self.host.world_size)]

    def close(self) -> None:
        for snapshotter in self.ranks.values():
            snapshotter.close()
        self.shelf.close()


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(*args, **kwargs) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
