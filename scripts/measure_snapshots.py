"""What a snapshot costs the training loop on this machine.

usage: python scripts/measure_snapshots.py [--mib 1024] [--takes 60]

Three states: 300 small parameters under AdamW (900 tensors and 300 counters: the cost of many), one of large tensors
(the cost of bytes), and nothing but generators (the floor). The best and the median of `takes`, after four warm ones,
which touch every buffer. Processor time is what a busy machine's wall time hides: there it is the figure to read.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.testing.loopback import LoopbackHost


class Box:
    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def small() -> dict:
    model = nn.ModuleList([nn.Linear(64, 64) for _ in range(150)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def large(mib: int) -> dict:
    model = nn.ParameterList([nn.Parameter(torch.zeros(16 << 18)) for _ in range(mib // 16)])
    return {"model": model}


def measure(name: str, state: dict, takes: int) -> None:
    shelf = Shelf()
    host = LoopbackHost(shelf)
    told = host.enter()
    snapshotter = Snapshotter(host.from_worker(0))
    host.receivers[0] = snapshotter.on_message
    snapshotter.begin(0, 1, told[0])
    begun = time.perf_counter()
    snapshotter.bind(state)
    bound = time.perf_counter() - begun
    for n in range(4):
        snapshotter.take(n)
    taken, processor = [], []
    for n in range(4, takes):
        begun = time.process_time()
        taken.append(snapshotter.take(n))
        processor.append(time.process_time() - begun)
    seconds = [t.seconds for t in taken]
    size, best, usual, busy = taken[0].bytes, min(seconds), statistics.median(seconds), min(processor)
    walks = []
    for _ in range(takes):
        begun = time.process_time()
        snapshotter.walk.collect()
        walks.append(time.process_time() - begun)
    snapshotter.settle()
    snapshotter.begin(0, 1, host.enter()[0])
    snapshotter.bind(state)
    begun = time.process_time()
    restored = snapshotter.restore().seconds
    spent = time.process_time() - begun
    print(
        f"{name:22}{size / 2**20:8.1f} MiB   take: best {best * 1e3:8.2f} ms, median {usual * 1e3:8.2f} ms, "
        f"{size / best / 1e9:5.2f} GB/s; processor {busy * 1e3:7.2f} ms, of it the walk {min(walks) * 1e3:5.2f} ms; "
        f"bind {bound * 1e3:7.1f} ms, restore {restored * 1e3:6.1f} ms"
        f" ({restored / size * 1e9:.2f} s a GB), processor {spent * 1e3:6.1f} ms, reading what is there included"
    )
    snapshotter.close()
    shelf.close()


def copy_rate(mib: int) -> float:
    source, target = torch.zeros(mib << 18), torch.zeros(mib << 18)
    seconds = []
    for _ in range(6):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return (mib << 20) / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the large state")
    parser.add_argument("--takes", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads; a plain copy makes {copy_rate(256):.2f} GB/s")
    measure("generators alone", {"box": Box(0)}, options.takes)
    measure("1,200 small tensors", small(), options.takes)
    measure(f"{options.mib // 16} tensors of 16 MiB", large(options.mib), max(8, options.takes // 4))


if __name__ == "__main__":
    main()
