"""One agent's shelf and its workers' snapshotters, in this process."""

import pytest
import torch

from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.layout import Layout, Leaf
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.checkpoint.tensors import view
from everstep.checkpoint.walk import StateWalk
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


class Kept:
    """One walk's bytes, kept in this process."""

    def __init__(self, walk: StateWalk) -> None:
        self.layout, parts = walk.collect()
        self.text = walk.encode(self.layout)
        self.bytes = bytearray(self.layout.payload_bytes)
        raw = torch.frombuffer(self.bytes, dtype=torch.uint8) if self.bytes else torch.empty(0, dtype=torch.uint8)
        for part in parts:
            leaves = [leaf for leaf in part.section.leaves if leaf.alias_of is None]
            for leaf, source in zip(leaves, part.sources, strict=True):
                view(raw[leaf.offset : leaf.offset + leaf.nbytes], leaf).copy_(source)

    def payload(self, leaf: Leaf) -> memoryview:
        return memoryview(self.bytes)[leaf.offset : leaf.offset + leaf.nbytes]

    def restore(self, walk: StateWalk) -> None:
        layout = Layout.from_json(self.text)
        assert layout == self.layout
        walk.restore(layout, self.payload)
        walk.restore_generators(layout, self.payload)

    def leaf(self, path: str) -> Leaf:
        return next(leaf for leaf in self.layout.leaves() if leaf.path == path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and (self.text, self.bytes) == (other.text, other.bytes)

    __hash__ = None


@pytest.fixture
def keep():
    return lambda state, **world: Kept(StateWalk(state, **world))
