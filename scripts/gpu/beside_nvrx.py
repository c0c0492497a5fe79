"""NVRx's checkpoint names on a GPU, NVRx's own and ours, by the same code in one run. One JSON line a case.

usage: PYTHONPATH=src python scripts/gpu/beside_nvrx.py [--gb 2] [--folder DIR]      (one GPU, under 200 s)

A world of one over NCCL. Each case is a process of its own with a limit, the two in turn; one that fails says so in
its line. `behind a long kernel` asks whether a synchronous local save waits for its copy from the device (W49): what it
saves is written by the device behind a kernel of half a second. `dcp` writes a state into 1, 2 and 4 files (W45);
NVRx's worker is handed the tensors in shared memory there, and by CUDA's handles in the last case.
"""

import argparse
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module

THEIRS, OURS = "nvidia_resiliency_ext.checkpointing", "everstep.checkpoint"
LIMIT_S = 45.0
SPIN = 1_000_000_000  # cycles: half a second


def state(total, step):
    """Sixteen tensors of a device, `total` bytes in all, filled with the step's number."""
    import torch

    return {f"t{n}": torch.full((int(total) // 16 // 4,), float(step), device="cuda") for n in range(16)}


def holds(found, step):
    """Return the fraction of tensors that hold that step, whole."""
    whole = [bool((t == step).all()) for name, t in found.items() if name.startswith("t")]
    return sum(whole) / len(whole)


def device_files(pid):
    """Count the driver's files that a process has open."""
    try:
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return 0
    return sum(name.startswith("/dev/nvidia") for name in names)


def torch_save(impl, folder, total):
    """`TorchAsyncCheckpoint`: five saves, the state changed as soon as each call has returned."""
    import psutil
    import torch

    saver = import_module(f"{impl}.async_ckpt.torch_ckpt").TorchAsyncCheckpoint()
    called, durable, right = [], [], []
    given = state(total, 0)
    for step in range(1, 6):
        for tensor in given.values():
            tensor.fill_(step)
        torch.cuda.synchronize()
        begun = time.monotonic()
        saver.async_save(given, f"{folder}/{step}.pt")
        called.append(time.monotonic() - begun)
        for tensor in given.values():
            tensor.fill_(-1)
        saver.finalize_async_save(blocking=True)
        durable.append(time.monotonic() - begun)
        right.append(holds(torch.load(f"{folder}/{step}.pt", map_location="cpu"), step))
        os.remove(f"{folder}/{step}.pt")
    below = psutil.Process().children(recursive=True)
    told = {
        "first_call_s": called[0], "call_s": statistics.median(called[1:]), "first_durable_s": durable[0],
        "durable_s": statistics.median(durable[1:]), "right": min(right), "processes": len(below),
        "with_device_files": sum(device_files(p.pid) > 0 for p in below),
    }  # fmt: skip
    saver.close()
    return told


def dcp(impl, folder, total, threads, shm=True):
    """`FileSystemWriterAsync` through the queue: three saves; seconds in the call, until finalized; what is read."""
    import torch
    import torch.distributed.checkpoint as torch_dcp

    core, saver = (import_module(f"{impl}.async_ckpt.{name}") for name in ("core", "state_dict_saver"))
    writer = import_module(f"{impl}.async_ckpt.filesystem_async").FileSystemWriterAsync
    queue = core.AsyncCallsQueue(cpu_shm_mode=shm)
    called, durable, right = [], [], []
    given = state(total, 0)
    for step in range(1, 4):
        for tensor in given.values():
            tensor.fill_(step)
        torch.cuda.synchronize()
        os.makedirs(f"{folder}/{step}", exist_ok=True)
        begun = time.monotonic()
        made = writer(f"{folder}/{step}", thread_count=threads, use_cpu_shm_for_gpu_tensors=shm)
        planned = saver.save_state_dict_async_plan(given, made)
        fn, preload, args = planned[0].get_save_function_and_args()
        finalize = partial(saver.save_state_dict_async_finalize, *planned)
        queue.schedule_async_request(core.AsyncRequest(fn, args, [finalize], preload_fn=preload))
        called.append(time.monotonic() - begun)
        queue.maybe_finalize_async_calls(blocking=True)
        durable.append(time.monotonic() - begun)
        into = state(total, 0)
        torch_dcp.load(into, storage_reader=torch_dcp.FileSystemReader(f"{folder}/{step}"), no_dist=True)
        right.append(holds(into, step))
        del into
        subprocess.run(["rm", "-rf", f"{folder}/{step}"], check=True)
    queue.close()
    return {"call_s": min(called), "durable_s": min(durable), "first_durable_s": durable[0], "right": min(right)}


def local_behind(impl, folder, total):
    """A synchronous local save of what the device has yet to write: behind a kernel that takes half a second."""
    import torch

    aware = import_module(f"{impl}.local.basic_state_dict").BasicTensorAwareStateDict
    manager = import_module(f"{impl}.local.ckpt_managers.local_manager").LocalCheckpointManager
    warm = [torch.full((int(total) // 16 // 4,), -7.0).pin_memory() for _ in range(16)]  # stale pinned memory to be had
    del warm
    gc.collect()
    right, took = [], []
    for iteration in range(1, 4):
        given = state(total, 0)
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN)
        for tensor in given.values():
            tensor.fill_(iteration)
        begun = time.monotonic()
        manager(folder, "job").save(aware(given), iteration)
        took.append(time.monotonic() - begun)
        torch.cuda.synchronize()
        fresh = manager(folder, "job")
        fresh.find_latest()
        right.append(holds(fresh.load()[0].state_dict, iteration))
    return {"right": right, "save_s": took}


def local(impl, folder, total):
    """An asynchronous local save, with a tensor of the host beside."""
    import torch

    aware = import_module(f"{impl}.local.basic_state_dict").BasicTensorAwareStateDict
    manager = import_module(f"{impl}.local.ckpt_managers.local_manager").LocalCheckpointManager
    queue = import_module(f"{impl}.async_ckpt.core").AsyncCallsQueue(False)
    called, durable, right = [], [], []
    try:
        aware({"t0": torch.ones(3, device="cuda"), "host": torch.ones(3)})
        mixed = "taken"
    except AssertionError:
        mixed = "AssertionError"
    for iteration in range(1, 4):
        given = state(total, iteration)
        torch.cuda.synchronize()
        begun = time.monotonic()
        request = manager(folder, "job").save(aware(given), iteration, is_async=True)
        queue.schedule_async_request(request)
        called.append(time.monotonic() - begun)
        queue.maybe_finalize_async_calls(blocking=True)
        durable.append(time.monotonic() - begun)
        fresh = manager(folder, "job")
        fresh.find_latest()
        right.append(holds(fresh.load()[0].state_dict, iteration))
    queue.close()
    return {"call_s": min(called), "durable_s": min(durable), "right": min(right), "host_tensor": mixed}


def kept(impl, folder, total):
    """What stays on the device when a finished save's state is let go of (CS-10)."""
    import torch

    saver = import_module(f"{impl}.async_ckpt.torch_ckpt").TorchAsyncCheckpoint()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    given = state(total, 1)
    saver.async_save(given, f"{folder}/x.pt")
    saver.finalize_async_save(blocking=True)
    given.clear()
    gc.collect()
    torch.cuda.empty_cache()
    told = {"device_bytes_kept": free - torch.cuda.mem_get_info()[0]}
    saver.close()
    return told


CASES = {
    "TorchAsyncCheckpoint": torch_save, "local, synchronous, behind a long kernel": local_behind,
    "local, asynchronous": local, "kept on the device": kept, "dcp, 1 file": partial(dcp, threads=1),
    "dcp, 2 files": partial(dcp, threads=2), "dcp, 4 files": partial(dcp, threads=4),
    "dcp, 2 files, tensors handed over on the device": partial(dcp, threads=2, shm=False),
}  # fmt: skip


def one(impl, case, folder, total) -> None:
    """Run one case here and print what was seen."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    faulthandler.dump_traceback_later(LIMIT_S / 2)  # where it stands is told, should it not end
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    told = CASES[case](impl, folder, total)
    print("@@ " + json.dumps(told), flush=True)
    os._exit(0)  # nothing that hangs at the end keeps the others


def main() -> None:
    """Run all cases, each with both."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--gb", type=float, default=2.0)
    found.add_argument("--folder", default=tempfile.gettempdir())
    found.add_argument("--cases", default="", help="those whose name has this")
    found.add_argument("--impls", nargs="+", default=[THEIRS, OURS])
    found.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = found.parse_args()
    if args.one:
        one(*args.one, args.gb * 1e9)
        return
    for case in [name for name in CASES if args.cases in name]:
        for impl in args.impls:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                words = [sys.executable, __file__, "--gb", str(args.gb), "--one", impl, case, folder]
                begun = time.monotonic()
                try:
                    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                    lines = [line[3:] for line in done.stdout.splitlines() if line.startswith("@@ ")]
                    told = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip()[-400:]}
                except subprocess.TimeoutExpired as late:
                    said = (late.stderr or b"").decode(errors="replace").strip()[-1500:]
                    told = {"failed": f"no end within {LIMIT_S:g} s", "said": said}
            body = {"case": case, "impl": impl.split(".")[0], "gb": args.gb, "s": time.monotonic() - begun} | told
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in body.items()}), flush=True)


if __name__ == "__main__":
    main()
