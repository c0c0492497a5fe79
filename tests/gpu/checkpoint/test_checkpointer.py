"""A Checkpointer whose state is on a GPU: every kind of tensor, faults of every kind, and no trace of it left there."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from everstep.checkpoint import Checkpointer, catalog
from everstep.checkpoint.staging import SCRATCH
from everstep.testing.same import differs, overlaps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
PATIENCE_S = 120.0


@pytest.fixture
def make(tmp_path):
    """Make Checkpointers; at the end none of their processes is left."""
    made = []

    def checkpointer(where="ckpt", **arguments):
        made.append(Checkpointer(tmp_path / where, **arguments))
        return made[-1]

    yield checkpointer
    for one in made:
        one.close(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while psutil.pid_exists(one._line.pid) and psutil.Process(one._line.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def kinds(seed=0):
    """Tensors of a device: every dtype and view, of a few bytes and of megabytes; host tensors beside, one pinned."""
    generator = torch.Generator("cuda").manual_seed(seed)
    wide = torch.randn(1 << 20, generator=generator, device="cuda")
    small = {str(dtype): (wide[:257] * 40).to(dtype) for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
        torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    )}  # fmt: skip
    words = (wide[:512] * 1e9).to(torch.int64)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz):
        small[str(dtype)] = words.view(dtype)[: 200 + dtype.itemsize]
    whole = torch.complex(wide[:300], wide[300:600])
    memory = wide[:4096].clone()
    return {
        "small": small, "wide": wide, "large": wide.repeat(8).bfloat16(), "complex": whole, "conj": whole.conj(),
        "neg": whole.conj().imag, "complex128": whole.to(torch.complex128), "t": wide[:6000].view(60, 100).t(),
        "every": wide[::3], "slice": wide[1000:1010].clone()[2:5], "zero": wide[5].clone(),
        "empty": torch.empty(0, 3, device="cuda"),
        "last": wide[:7200].view(2, 3, 30, 40).contiguous(memory_format=torch.channels_last),
        "a": memory[:100], "b": memory[50:150].view(10, 10), "parameter": torch.nn.Parameter(wide[:77].clone()),
        "host": wide[:50].cpu(), "pinned": wide[:5000].cpu().pin_memory(), "plain": [1, 2.5, "text", None, b"x"],
    }  # fmt: skip


def on_host(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return [on_host(each) for each in value] if isinstance(value, list) else value


def devices(value):
    if isinstance(value, torch.Tensor):
        return [value.device.type]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [device for child in children for device in devices(child)]


def test_every_kind_of_tensor_of_a_device_comes_back_to_the_bit(make):
    """CS-20, CS-01: from memory and from disk, onto the device; what changes after the call is not in it."""
    state = {"kinds": kinds(1)}
    ckpt = make()
    handle = ckpt.save(1, state)
    expected, where, shared = on_host(state), devices(state), overlaps(state["kinds"])
    with torch.no_grad():
        for name in ("wide", "large", "complex", "zero", "a", "parameter", "pinned"):
            state["kinds"][name].zero_()
        for tensor in state["kinds"]["small"].values():
            tensor.zero_()
    assert handle.wait(PATIENCE_S).what == "committed"
    restored = ckpt.restore(state)
    assert (restored.step, restored.tier) == (1, "memory")
    torch.cuda.synchronize()
    assert differs(expected, on_host(state)) == ""
    ckpt.close()
    other = {"kinds": kinds(2)}
    again = make()
    assert again.restore(other).tier == "disk"
    assert differs(expected, on_host(other)) == ""
    assert devices(other) == where
    assert overlaps(other["kinds"]) == shared
    fresh = {"kinds": {}}
    again.restore(fresh)  # into nothing: made anew, on the device
    assert differs(expected, on_host(fresh)) == ""
    again.close()


def test_the_second_pinned_save_and_all_later_ones_work_whatever_has_changed(make):
    """CS-05: larger, smaller, another dtype, another number of tensors; each is read back from its file."""
    ckpt = make(keep=None)
    shapes = [
        (1 << 20, 1),
        (1 << 20, 1),
        (1 << 22, 3),
        (1 << 10, 500),
        (1 << 23, 2),
        (1 << 20, 1),
        (7, 2000),
        (1 << 20, 4),
    ]
    for step, (size, count) in enumerate(shapes, 1):
        dtype = torch.bfloat16 if step % 2 else torch.float32
        state = {"t": {str(n): torch.full((size,), float(step), dtype=dtype, device="cuda") for n in range(count)}}
        assert ckpt.save(step, state).wait(PATIENCE_S).what == "committed"
    locked = [buffer._locked for each in ckpt._snapshotter._sets.values() for buffer in each.buffers.values()]
    assert locked, "no buffer is mapped"
    assert all(locked), "the driver did not lock the buffers' pages"
    for step, (size, count) in enumerate(shapes, 1):
        found = {"t": {}}
        assert ckpt.restore(found, step=step).step == step
        assert len(found["t"]) == count
        assert all(t.numel() == size and t.is_cuda and bool((t == step).all()) for t in found["t"].values())


def test_a_pinned_buffer_is_not_used_again_before_its_writer_is_done(make):
    """CS-07: saves at every step, far faster than the disk; whatever is committed is one step's state, whole."""
    ckpt = make(keep=None)
    state = {"t": [torch.zeros(1 << 24, device="cuda") for _ in range(4)]}  # 256 MiB
    handles = []
    for step in range(1, 150):
        for tensor in state["t"]:
            tensor.fill_(step)
        handles.append(ckpt.save(step, state))
    ckpt.close(PATIENCE_S)
    committed = sorted(one.step for one in catalog.scan(str(ckpt.directory)))
    again = make()
    assert committed[-1] == 149
    for step in committed:
        assert again.restore(state, step=step).step == step
        assert all(bool((tensor == step).all()) for tensor in state["t"]), f"step {step} is torn"
    print(json.dumps({"saves": len(handles), "committed": len(committed)}))


def device_files(pid):
    """The driver's files that a process has open or mapped."""
    names = {line.rsplit(" ", 1)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sorted(name for name in names if name.startswith("/dev/nvidia"))


def test_keepers_and_writers_have_nothing_of_the_device_and_saves_leave_nothing_on_it(make):
    """CS-08: no process of ours is forked from one with a context. CS-10: no copy on the device, and none is kept.

    Between saves a Checkpointer holds the objects that were saved last, themselves; `close` lets go of them.
    """
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    base, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for number in range(3):
        state = {"t": [torch.randn(1 << 26, device="cuda") for _ in range(4)]}  # a GiB
        with_state = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ckpt = make(f"ckpt-{number}")
        for step in (1, 2):
            ckpt.save(step, state).wait(PATIENCE_S)
        keeper = psutil.Process(ckpt._line.pid)
        family = [keeper, *keeper.children(recursive=True)]
        assert len(family) >= 2
        assert {p.pid: device_files(p.pid) for p in family} == {p.pid: [] for p in family}
        assert device_files(os.getpid()), "the look sees nothing"
        assert torch.cuda.max_memory_allocated() - with_state <= SCRATCH
        ckpt.close()
        del state
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == base
        assert torch.cuda.memory_reserved() <= kept + SCRATCH  # of this process: others use the device as well


def test_released_memory_of_the_device_is_free_between_saves_and_the_next_save_is_whole(make):
    """CS-10: a loop that unloads its model from the device between saves has the memory back at once."""
    ckpt = make("ckpt")
    torch.nn.Linear(64, 64, device="cuda")(torch.randn(4, 64, device="cuda")).sum().backward()  # the libraries' own
    base = torch.cuda.memory_allocated()
    for step in range(1, 5):
        model = torch.nn.Linear(8192, 8192, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8192, device="cuda")).sum().backward()
        optimizer.step()
        wanted = model.weight.detach().cpu()
        handle = ckpt.save(step, {"model": model, "optimizer": optimizer})
        ckpt.release()
        del model, optimizer
        gc.collect()
        assert torch.cuda.memory_allocated() <= base + SCRATCH, f"something of step {step} is held"
        handle.wait(PATIENCE_S)
    ckpt.close()
    again = torch.nn.Linear(8192, 8192, device="cuda")
    state = {"model": again, "optimizer": torch.optim.AdamW(again.parameters())}
    assert make("ckpt").restore(state).step == 4
    assert torch.equal(again.weight.detach().cpu(), wanted)


LOOP = """
    import hashlib, json, os, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from everstep.checkpoint import Checkpointer
    folder, kind, backend, notes, steps, dies = *sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6])
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    if kind != "plain": dist.init_process_group(backend)
    rank = dist.get_rank() if kind != "plain" else 0
    torch.manual_seed(3)
    layer = lambda: (nn.Linear(301, 301), nn.BatchNorm1d(301), nn.Dropout(0.1), nn.Tanh())
    model = nn.Sequential(*[part for _ in range(5) for part in layer()]).cuda()
    if kind == "fsdp2":
        for layer in model:
            if isinstance(layer, nn.Linear): fully_shard(layer)
        fully_shard(model)
    if kind == "ddp": model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    shadow = torch.zeros(1001, dtype=torch.bfloat16, device="cuda")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "shadow": shadow}
    torch.manual_seed(50 + rank)
    with Checkpointer(folder, tiers={"memory": 1, "disk": 4}) as ckpt:
        restored = ckpt.restore(state)
        first = restored.step + 1 if restored else 1
        for step in range(first, steps + 1):
            loss = model(torch.randn(32, 301, device="cuda")).square().mean()
            loss.backward(); optimizer.step(); optimizer.zero_grad(); scheduler.step()
            shadow.add_(loss.detach())
            with open(notes, "a") as out:
                out.write(json.dumps({"rank": rank, "step": step, "loss": loss.item().hex(), "first": first,
                                      "shadow": shadow[0].item(), "tier": restored.tier if restored else ""}) + "\\n")
            ckpt.save(step, state)
            if step == dies and rank == 0: os.kill(os.getpid(), 9)
    if kind != "plain": dist.destroy_process_group()
"""
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_CPP_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("kind", "backend", "ranks"),
    [("plain", "", 1), ("fsdp2", "nccl", 1), ("fsdp2", "cpu:gloo,cuda:gloo", 2), ("ddp", "cpu:gloo,cuda:gloo", 2)],
)
def test_a_loop_that_is_killed_goes_on_as_its_twin_to_the_bit(tmp_path, kind, backend, ranks):
    """Saved at every step, killed by SIGKILL, started again: at most a step is lost, and every loss is the twin's."""
    script, steps, dies = tmp_path / "loop.py", 30, 18
    script.write_text(textwrap.dedent(LOOP))

    def run(name, dies):
        start = [sys.executable, str(script)]
        if kind != "plain":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
            start = [*torchrun, "--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(ranks), str(script)]
        words = [*start, str(tmp_path / name), kind, backend, str(tmp_path / f"{name}.jsonl"), str(steps), str(dies)]
        return subprocess.run(words, env=os.environ | CUBLAS, capture_output=True, text=True, timeout=200, check=False)

    def told(name):
        return [json.loads(line) for line in Path(tmp_path / f"{name}.jsonl").read_text().splitlines()]

    twin = run("twin", 0)
    assert twin.returncode == 0, twin.stderr[-4000:]
    hurt = run("hurt", dies)
    assert hurt.returncode in (-signal.SIGKILL, 1), hurt.stderr[-4000:]
    again = run("hurt", 0)
    assert again.returncode == 0, again.stderr[-4000:]
    expected = {(n["rank"], n["step"]): (n["loss"], n["shadow"]) for n in told("twin")}
    found: dict = {}
    for n in told("hurt"):
        found.setdefault((n["rank"], n["step"]), set()).add((n["loss"], n["shadow"]))
    assert len(expected) == ranks * steps
    assert found == {key: {value} for key, value in expected.items()}
    first = max(n["first"] for n in told("hurt"))
    print(json.dumps({"kind": kind, "backend": backend, "killed_after": dies, "went_on_with": first}))
    assert dies - 1 <= first - 1 <= dies
