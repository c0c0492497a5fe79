"""What public reports say goes wrong with saves, each as it was reported (CASES CS-03 to CS-24)."""

import ast
import copy
import gc
import mmap
import os
import resource
import weakref
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import everstep.checkpoint
from everstep.checkpoint import load, publish, shards
from everstep.checkpoint.core import segment
from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section, place
from everstep.checkpoint.staging import HostStager, grouped
from everstep.checkpoint.tensors import view
from everstep.checkpoint.walk import StateWalk
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.kept import Kept
from everstep.testing.same import differs

GIB = 1 << 30
NORESERVE = 0x4000  # of Linux; Python's mmap has no name for it


class Box:
    def __init__(self, value=None) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def large(size: int) -> set[int]:
    """Where the memory of tensors of at least so many bytes lies: states, copies of them, mapped buffers."""
    gc.collect()
    dense = [
        x for x in gc.get_objects() if type(x) is torch.Tensor and x.layout is torch.strided and not x.is_quantized
    ]
    found = [x for x in dense if x.device.type == "cpu" and x.untyped_storage().nbytes() >= size]
    return {x.untyped_storage().data_ptr() for x in found}


def test_memory_does_not_rise_by_saves(bench):
    """CS-03: thirty saves, then thirty by thirty workers of the rank, one after the other: a state and its buffers."""
    b = bench()
    size = 2 << 20
    before = len(large(size))
    (worker,) = b.enter()
    box = Box(torch.zeros(size, dtype=torch.uint8))
    worker.bind({"box": box})
    for n in range(1, 31):
        worker.take(n)
        if n in (3, 30):
            assert len(large(size)) - before == 1 + 4
    held = b.shelf.bytes
    for n in range(30):
        (worker,) = b.enter(replace=(0,))
        worker.bind({"box": box})
        worker.restore()
        worker.take(worker.instructions["restore"]["step"] + 1)
        if n in (3, 29):
            assert len(large(size)) - before == 1 + 4
    assert b.shelf.bytes == held
    worker.close()
    assert len(large(size)) - before == 1


CHANGES = {
    "the same keys": lambda s: s,
    "one more": lambda s: s | {"more": torch.ones(5)},
    "one less": lambda s: {k: v for k, v in s.items() if k != "w0"},
    "another dtype": lambda s: s | {"w0": torch.ones(8, dtype=torch.float64)},
    "another shape": lambda s: s | {"w0": torch.ones(3, 3)},
    "larger than the buffers": lambda s: s | {"w0": torch.ones(1 << 17)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_second_save_and_all_later_ones_work_whatever_has_changed(name, bench):
    """CS-05: the state dict is made anew for each save."""
    b = bench()
    (worker,) = b.enter()
    box = Box()
    worker.bind({"box": box})
    for n in range(1, 6):
        box.value = {f"w{k}": torch.full((8,), float(n)) for k in range(4)}
        if n == 4:
            box.value = CHANGES[name](box.value)
        last = copy.deepcopy(box.value)
        worker.take(n)
        if n >= 4:
            (worker,) = b.enter(replace=(0,))
            loaded = Box()
            worker.bind({"box": loaded})
            assert worker.restore().step == n
            assert differs(last, loaded.value) == ""
            worker.bind({"box": box})


def test_a_buffer_is_not_written_again_before_its_reader_is_done(bench):
    """CS-07: 64 tensors filled with the step; a slow writer reads each save while steps go on."""
    b = bench()
    (worker,) = b.enter()
    tensors = {f"t{n}": torch.zeros(32) for n in range(64)}
    worker.bind({"box": Box(tensors)})
    reading: tuple[int, int] | None = None
    finished = []
    for step in range(1, 51):
        for value in tensors.values():
            value.fill_(step)
        if reading is not None and step - reading[0] == 8:
            finished.append(reading[0])
            b.shelf.release(0, reading[1])
            reading = None
        taken = worker.take(step, hold=reading is None and step % 2 == 0)
        if taken.held:
            reading = (step, taken.buffer)
            b.shelf.hold(0, taken.buffer, taken.hold)
        if reading is not None:
            buffer = worker._current().buffers[reading[1]]
            header = buffer.header()
            assert header.step == reading[0]
            for leaf in (x for x in buffer.layout(header).leaves() if x.path.startswith("box/")):
                assert set(np.frombuffer(buffer.payload(header, leaf), np.float32)) == {reading[0]}
    assert len(finished) >= 5


def test_nothing_that_runs_in_a_worker_forks_or_starts_a_process():
    """CS-08: no child inherits a CUDA context: writers are the agent's, forked where none was ever made."""
    for name in ("snapshot", "buffers", "staging", "walk", "tensors", "remake", "modules", "optimizers", "objects",
                 "values", "generators", "flat", "sharded", "watch", "intent_client", "load"):  # fmt: skip
        tree = ast.parse(Path(everstep.checkpoint.__file__).with_name(f"{name}.py").read_text())
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        calls = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not [n for n in names if n and n.split(".")[0] in ("multiprocessing", "subprocess", "pty")], name
        assert not calls & {"fork", "forkpty", "posix_spawn", "system", "popen"}, name


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_do_not_depend_on_the_number_of_tensors(bench):
    """CS-11: 5,000 tensors under a limit of 200 more descriptors than are open; 200 saves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, open_files() + 200), hard))
    try:
        used = []
        for count, saves in ((10, 200), (5000, 3)):
            b = bench()
            before = open_files()
            (worker,) = b.enter()
            worker.bind({"box": Box([torch.zeros(1) for _ in range(count)])})
            for n in range(1, saves + 1):
                worker.take(n)
            used.append(open_files() - before)
        assert used == [12, 12]  # four buffers: the agent's descriptor and mapping, the worker's mapping
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module) -> float:
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    return loss.item()


MOMENTS = ("before the first step", "between backward and step", "between step and zero_grad", "after zero_grad")


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_optimizer_is_whole_whatever_gradients_are_set(moment):
    """CS-21: and saving leaves gradients, generators and step counts as they are."""
    model, optimizer = build()
    if moment != MOMENTS[0]:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
    if moment in MOMENTS[2:]:
        optimizer.step()
    if moment == MOMENTS[3]:
        optimizer.zero_grad(set_to_none=True)
    before = copy.deepcopy((optimizer.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()))
    kept = Kept(StateWalk({"model": model, "optimizer": optimizer}))
    after = optimizer.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state()
    assert differs(list(before), list(after)) == ""
    other, resumed = build()
    backward(other)  # gradients of its own, which are no part of the state
    kept.restore(StateWalk({"model": other, "optimizer": resumed}))
    assert differs(before[0], resumed.state_dict()) == ""
    for each in (optimizer, resumed):
        each.zero_grad()

    def go_on(m, o):
        torch.set_rng_state(before[2])
        losses = []
        for _ in range(5):
            losses.append(backward(m))
            o.step()
            o.zero_grad()
        return losses

    assert go_on(model, optimizer) == go_on(other, resumed)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_a_quantised_tensor_is_refused_by_its_key():
    """CS-20."""
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"^box/value is a tensor of dtype torch.qint8"):
        Kept(StateWalk({"box": Box(value)}))


def sparse(size: int) -> mmap.mmap:
    """So many zeros that take no memory until they are written."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)


def test_places_beyond_four_gib_are_told_and_written_right():
    """CS-24: the arithmetic of a payload of 14 GiB, in memory that is not there."""
    sizes = [(1 << 31) + 5, (1 << 32) + 5, 4 * ((1 << 31) + 5)]
    leaves, end = place([
        Leaf("m/a", "uint8", (sizes[0],), sizes[0]), Leaf("m/b", "uint8", (sizes[1],), sizes[1]),
        Leaf("m/c", "float32", (sizes[2] // 4,), sizes[2]), Leaf("m/d", "int64", (3,), 24),
    ])  # fmt: skip
    layout = Layout(0, 1, (Section("m", {x.path[2:]: Ref(n) for n, x in enumerate(leaves)}, leaves),))
    assert Layout.from_json(layout.to_json()) == layout
    assert [x.offset % 64 for x in leaves] == [0] * 4
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(leaves))
    assert layout.payload_bytes == end == leaves[-1].offset + 24
    meta = layout.to_json()
    buffer = sparse(segment.needed_bytes(end, len(meta)))
    header = segment.Header(1, 7, 0, 0, -1, 0, 1, end, len(meta))
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    pairs = []
    last = leaves[-1]
    for leaf, source in ((leaves[0], None), (last, torch.tensor([1, -2, 1 << 62]))):
        at = segment.HEADER_BYTES + leaf.offset
        if source is not None:
            pairs.append((view(raw[at : at + leaf.nbytes], leaf), source))
    HostStager().stage(grouped(pairs, raw), [])
    for leaf in leaves[:3]:  # its last element alone
        raw[segment.HEADER_BYTES + leaf.offset + leaf.nbytes - 1] = 7
    with memoryview(buffer) as writable:
        segment.write(writable, header, meta)
        segment.seal(writable, 1)
        found = segment.parse(writable)
        assert isinstance(found, segment.Header)
        assert (found.payload_bytes, found.step) == (end, 7)
        text = bytes(writable[found.meta_offset : found.meta_offset + found.meta_bytes])
        assert Layout.from_json(text) == layout
        start = found.payload_offset + last.offset
        assert np.frombuffer(writable[start : start + 24], np.int64).tolist() == [1, -2, 1 << 62]
        assert [writable[found.payload_offset + x.offset + x.nbytes - 1] for x in leaves[:3]] == [7, 7, 7]


class SparseFiles(UnsyncedFiles):
    """Leaves holes where zeros are written, and writes at most so much at once."""

    def write(self, fd, data):
        piece = memoryview(data)[: 3 << 20]
        if len(piece) > 4096 and not np.frombuffer(piece, np.uint8).any():
            os.ftruncate(fd, os.lseek(fd, len(piece), os.SEEK_CUR))
            return len(piece)
        return super().write(fd, piece)


def available() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:"))) * 1024


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(available() < 8 * GIB, reason="needs 8 GiB of memory to read the tensor back")
@pytest.mark.parametrize("size", [(1 << 31) + 5, (1 << 32) + 5])
def test_a_tensor_beyond_four_gib_comes_back_from_a_disk(size, tmp_path):
    """CS-24: marked at its first, middle and last byte and at every GiB; through short writes, into a sparse file."""
    leaves, end = place([Leaf("m/big", "uint8", (size,), size), Leaf("m/after", "int64", (), 8)])
    layout = Layout(0, 1, (Section("m", {"big": Ref(0), "after": Ref(1)}, leaves),))
    payload = sparse(end)
    marks = {0: 1, size // 2: 2, size - 1: 3} | {n * GIB: 4 + n for n in range(1, size // GIB + 1)}
    for at, mark in marks.items():
        payload[at] = mark
    payload[leaves[1].offset : end] = (99).to_bytes(8, "little")
    target = shards.Target("s", 1, 0, 0, 1, f"{tmp_path}/step-1.0.0.0123abcd-1.tmp")
    files = SparseFiles()
    with memoryview(payload) as content:
        fragment = shards.write_shard(files, target, layout, layout.to_json(), content, {})
    publish.publish(files, str(tmp_path), target.folder, [fragment], lambda _: b"")
    taken = sum(f.stat().st_blocks * 512 for f in (tmp_path / "step-1").iterdir())
    assert taken < 64 << 20
    with load.open_checkpoint(str(tmp_path / "step-1"), 0, 1) as state:
        found = np.frombuffer(state.bytes_of(leaves[0]), np.uint8)
        assert {int(at): int(found[at]) for at in found.nonzero()[0]} == marks
        assert int.from_bytes(state.bytes_of(leaves[1]), "little") == 99


def test_a_walk_that_is_let_go_takes_the_state_with_it_at_once():
    """CS-10, M12: no cycle keeps a failed attempt's tensors until the next collection."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer = build()
        backward(model)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "box": Box(torch.ones(3)), "values": {"w": torch.ones(2)}}
        walk = StateWalk(state, values=True, allow_pickle=True)
        walk.collect()
        kept = [weakref.ref(x) for x in (walk, *walk._sources, *[s for p in walk.collect()[1] for s in p.sources])]
        del walk
        assert [ref for ref in kept if ref() is not None] == []
    finally:
        gc.enable()


def test_nothing_is_hashed_in_the_loop(bench, monkeypatch):
    """E28, M7: a hash is a pass over memory; a snapshot is trusted by its seal, and hashed by whoever reads it."""
    b = bench()
    (worker,) = b.enter()
    worker.bind({"box": Box(torch.zeros(1 << 20, dtype=torch.uint8))})
    hashed = []
    real = zlib.crc32
    monkeypatch.setattr(
        "everstep.checkpoint.core.segment.zlib.crc32", lambda d, *a: (hashed.append(len(d)), real(d, *a))[1]
    )
    monkeypatch.setattr("xxhash.xxh3_64", lambda *_: pytest.fail("hashed"))
    monkeypatch.setattr("xxhash.xxh3_64_hexdigest", lambda *_: pytest.fail("hashed"))
    worker.take(1)
    assert sum(hashed) < 64 << 10  # header and description
