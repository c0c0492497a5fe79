"""CL-13: each sample of an epoch is trained on exactly once, whatever was fetched ahead when a rank died."""

import random
from collections import Counter

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.testing.loopback import LoopbackHost

SAMPLES, BATCH, EPOCHS = 60, 4, 2
STEPS = EPOCHS * SAMPLES // BATCH

pytestmark = pytest.mark.procs


def loader(workers: int) -> StatefulDataLoader:
    return StatefulDataLoader(list(range(SAMPLES)), batch_size=BATCH, shuffle=True, num_workers=workers)


def committed(workers: int, deaths: list[int]) -> tuple[list[list[int]], int]:
    """Train; at each number of steps in `deaths` the rank dies inside the next one. Return what each step consumed."""
    shelf = Shelf()
    host = LoopbackHost(shelf)
    consumed: dict[int, list[int]] = {}
    left, executed, step = list(deaths), 0, 0
    torch.manual_seed(5)
    while step < STEPS:
        told = host.enter()
        worker = Snapshotter(host.from_worker(0))
        host.receivers[0] = worker.on_message
        worker.begin(0, 1, told[0])
        data = loader(workers)
        worker.bind({"loader": data})
        recovered = worker.restore()
        step = recovered.step if recovered else 0
        batches = iter(data)
        worker.restore_generators()
        if recovered is None:
            worker.take(0)
        while step < STEPS:
            batch = next(batches, None)
            if batch is None:
                batches = iter(data)
                batch = next(batches)
            executed += 1
            if left and step == left[0]:
                left.pop(0)
                torch.manual_seed(random.randrange(1000))  # the next process starts from anywhere
                break
            step += 1
            consumed[step] = batch.tolist()
            worker.take(step)
        del batches
        worker.close()
    shelf.close()
    return [consumed[n] for n in range(1, STEPS + 1)], executed


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_an_epoch_in_the_twin_s_order(workers):
    deaths = sorted(random.Random(workers).sample(range(1, STEPS), 5 if workers == 0 else 3))
    faulty, executed = committed(workers, deaths)
    twin, _ = committed(workers, [])
    assert faulty == twin
    assert executed == STEPS + len(deaths)
    half = STEPS // EPOCHS
    for epoch in range(EPOCHS):
        seen = Counter(n for batch in faulty[epoch * half : (epoch + 1) * half] for n in batch)
        assert seen == Counter(range(SAMPLES))
