"""What reading a checkpoint costs, every byte verified: by one thread and by several, and the whole directory's check.

usage: python scripts/measure_load.py DIR [--mib 512] [--tensors 16]

Writes a checkpoint of one rank below DIR (which must not hold one), reads it with `State.prepare`, and removes it. The
files are in the page cache, so this is the cost of reading, hashing and keeping, not of a disk.
"""

import argparse
import os
import time

import xxhash

from everstep.checkpoint import catalog
from everstep.checkpoint.core import names
from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section, place
from everstep.checkpoint.fileops import PosixFiles
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard

STEP = 1


def save(directory: str, mib: int, count: int) -> str:
    size = (mib << 20) // count
    leaves, end = place(Leaf(f"model/{n}", "uint8", (size,), size, replicated=True) for n in range(count))
    layout = Layout(0, 1, (Section("model", {str(n): Ref(n) for n in range(count)}, leaves),))
    payload = memoryview(bytearray(os.urandom(1 << 20) * (end // (1 << 20) + 1)))[:end]
    folder = os.path.join(directory, str(names.Staging(STEP, 0, 0, "abcdef01", 1)))
    part = write_shard(PosixFiles(), Target("s", STEP, 0, 0, 1, folder), layout, layout.to_json(), payload, {})
    publish(PosixFiles(), directory, folder, [part], lambda manifest: b"none")
    return os.path.join(directory, names.committed(STEP))


def best(doing, tries: int = 5) -> float:
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        doing()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=16)
    options = parser.parse_args()
    os.makedirs(options.directory, exist_ok=True)
    path, gigabytes = save(options.directory, options.mib, options.tensors), options.mib * 2**20 / 1e9
    content = bytes(options.mib << 20)
    hashed = best(lambda: xxhash.xxh3_64(content))
    print(f"xxh3 alone: {gigabytes / hashed:.1f} GB/s")

    def read(threads: int, budget: int) -> None:
        with open_checkpoint(path, 0, 1) as state:
            state.prepare(budget_bytes=budget, threads=threads)

    for threads in (1, 2, 4):
        kept = best(lambda threads=threads: read(threads, 1 << 62))
        checked = best(lambda threads=threads: read(threads, 0))
        print(f"{threads} threads: {gigabytes / kept:.2f} GB/s read and kept, {gigabytes / checked:.2f} GB/s checked")
    (found,) = catalog.scan(options.directory)
    print(f"the whole directory: {gigabytes / best(lambda: catalog.verify(found)):.2f} GB/s (one file)")
    catalog.discard(options.directory, STEP)


if __name__ == "__main__":
    main()
