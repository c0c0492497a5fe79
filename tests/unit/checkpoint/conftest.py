"""One agent's shelf and its workers' snapshotters, in this process."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.checkpoint.walk import StateWalk
from everstep.inprocess import groups
from everstep.testing.kept import Kept
from everstep.testing.loopback import LoopbackHost

torch.set_num_threads(1)


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


@pytest.fixture
def keep():
    return lambda state, **world: Kept(StateWalk(state, **world))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    for _, empty in groups.caches():  # DTensor's caches know meshes, and with them the rank that we were
        empty()


@pytest.fixture
def as_rank():
    """Be one rank of a world that does not exist: a collective would return at once, with nothing done."""

    def become(rank: int, world: int) -> None:
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    leave()
