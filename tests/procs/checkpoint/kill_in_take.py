"""Kill a rank at a random moment of its snapshots, many times; look at what the holder has.

usage: kill_in_take.py SEEDS        prints one JSON object
"""

import json
import mmap
import os
import random
import struct
import sys
import time
from collections import Counter

import torch
from small_agent import SmallAgent

from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.shelf import Shelf

WORDS = 1 << 17  # int64: 1 MiB a tensor, so that most of a step is the copy
TENSORS = 4


class Counting:
    """State that is a pure function of the step."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(WORDS, dtype=torch.int64) for _ in range(TENSORS)]
        self.step = 0

    def advance(self) -> None:
        self.step += 1
        for n, tensor in enumerate(self.tensors):
            tensor.fill_(self.step * 100 + n)

    def state_dict(self):
        return {"step": self.step, "tensors": self.tensors}

    def load_state_dict(self, state):
        self.step, self.tensors = state["step"], state["tensors"]


def victim(page: mmap.mmap):
    def body(snapshotter, link, rank):
        torch.set_num_threads(1)
        state = Counting()
        snapshotter.bind({"counting": state})
        snapshotter.restore()
        while True:
            state.advance()
            snapshotter.take(state.step)
            struct.pack_into("=q", page, 0, state.step)

    return body


def contents(shelf: Shelf, buffer: int) -> tuple[int, bool]:
    """Return the step that a sealed buffer claims, and whether every byte is that step's."""
    header = shelf.header(0, buffer)
    assert isinstance(header, Header)
    with mmap.mmap(shelf.fd(0, buffer), 0) as whole:
        meta = Layout.from_json(whole[header.meta_offset : header.meta_offset + header.meta_bytes])
        section = meta.section("counting")
        assert section is not None
        exact = section.tree["step"] == header.step
        for n, leaf in enumerate(section.leaves):
            start = header.payload_offset + leaf.offset
            exact = exact and whole[start : start + leaf.nbytes] == struct.pack("=q", header.step * 100 + n) * WORDS
    return header.step, exact


def main(seeds: int) -> dict:
    found: Counter[str] = Counter()
    page = mmap.mmap(-1, 4096)
    shelf = Shelf()
    agent = SmallAgent(shelf, 1)
    last = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        agent.generation(victim(page))
        told = agent.told[0]["restore"]
        agent.pump(until=lambda goal=last + 5: struct.unpack_from("=q", page, 0)[0] >= goal)
        until = time.perf_counter() + rng.uniform(0, 0.006)
        while time.perf_counter() < until:
            pass
        agent.kill(0)
        assert agent.reap() == {0: -9}
        done = struct.unpack_from("=q", page, 0)[0]
        sealed = shelf.sealed()
        kept = [contents(shelf, s.buffer) for s in sealed]
        found["kills"] += 1
        found["torn"] += len(sealed) < 4
        found["restored exactly"] += told is None or told["step"] == last
        found["inexact"] += sum(not exact for _, exact in kept)
        newest = max(step for step, _ in kept)
        found["lost"] += newest < done  # a snapshot whose take had returned is gone
        if newest > done + 1:
            found["beyond"] += 1
            print(f"seed {seed}: page {done}, told {told}, last {last}, kept {kept}", file=sys.stderr)
        last = newest
        struct.pack_into("=q", page, 0, last)
    shelf.close()
    return {"beyond": 0} | dict(found) | {"steps": last, "descriptors": len(os.listdir("/proc/self/fd"))}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
