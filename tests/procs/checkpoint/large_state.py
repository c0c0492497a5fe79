"""Take and read back snapshots of a state of so many bytes.

usage: large_state.py BYTES        prints one JSON object
"""

import json
import os
import sys

import torch

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


def main(size: int) -> dict:
    shelf = Shelf()
    host = LoopbackHost(shelf)
    told = host.enter()
    snapshotter = Snapshotter(host.from_worker(0))
    host.receivers[0] = snapshotter.on_message
    snapshotter.begin(0, 1, told[0])
    box = Box(torch.arange(size // 8))
    snapshotter.bind({"box": box})
    seconds = []
    for step in range(1, 6):
        box.value[0] = step
        seconds.append(snapshotter.take(step).seconds)
    snapshotter.settle()
    told = host.enter()
    snapshotter.begin(0, 1, told[0])
    expected, box.value = box.value, None
    snapshotter.bind({"box": box})
    snapshotter.restore()
    exact = torch.equal(box.value, expected)
    snapshotter.close()
    shelf.close()
    shm = os.statvfs("/dev/shm")
    return {"shm": shm.f_blocks * shm.f_frsize, "exact": exact, "gb_per_s": size / min(seconds) / 1e9}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
