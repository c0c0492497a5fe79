"""What the disk tier costs: writing, verifying and reading one rank's state. Usage: measure_disk.py DIR [MIB]

One rank, one shard of MIB (default 512) in tensors of 4 MiB, three times; prints the best of each as JSON. "plain" is
how fast the directory takes the same bytes by one write and fsync, which bounds all else.
"""

import json
import os
import sys
import tempfile

from everstep.checkpoint import catalog
from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section, place
from everstep.checkpoint.dcp import metadata_bytes
from everstep.checkpoint.fileops import PosixFiles, put
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.clock import SYSTEM

TENSOR = 4 << 20


def timed(function):
    begun = SYSTEM.now()
    made = function()
    return SYSTEM.now() - begun, made


def measure(where, layout, payload):
    files, folder, took = PosixFiles(), f"{where}/step-1.0.0.0123abcd-1.tmp", {}
    target = Target("m", 1, 0, 0, 1, folder)
    took["plain"], _ = timed(lambda: put(files, f"{where}/plain", bytes(payload)))
    took["write"], fragment = timed(lambda: write_shard(files, target, layout, layout.to_json(), payload, {}))
    took["publish"], _ = timed(lambda: publish(files, where, folder, [fragment], metadata_bytes))
    (found,) = catalog.scan(where)
    took["verify"], wounds = timed(lambda: catalog.verify(found))
    assert not wounds
    with open_checkpoint(found.path, 0, 1) as state:
        took["read"], read = timed(state.payload)
    assert read == payload
    return took


def main(directory, mib):
    count = max(1, (mib << 20) // TENSOR)
    leaves, end = place(Leaf(f"model/{n}", "float32", (TENSOR // 4,), TENSOR, replicated=True) for n in range(count))
    layout = Layout(0, 1, (Section("model", {str(n): Ref(n) for n in range(count)}, leaves),))
    payload, best = memoryview(os.urandom(end)), {}
    for _ in range(3):
        with tempfile.TemporaryDirectory(dir=directory) as where:
            took = measure(where, layout, payload)
        best = {name: min(seconds, best.get(name, seconds)) for name, seconds in took.items()}
    rates = {f"{name}_gb_s": round(end / seconds / 1e9, 2) for name, seconds in best.items() if name != "publish"}
    print(json.dumps({"mib": mib, **rates, "publish_ms": round(best["publish"] * 1e3, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 512)
