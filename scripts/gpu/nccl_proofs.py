"""What NCCL allows around a restart, on two GPUs (EXPERIMENTS N1, N2). Prints one JSON line per case.

usage: nccl_proofs.py            runs every case; each rank is a process of its own, ended by a deadline
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

DEADLINE_S = 25.0
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}

CASES = [
    (f"creation {how}, {'non-blocking' if env else 'blocking'}", "creation", how, OURS | env)
    for how in ("lazy", "eager", "new_group")
    for env in ({}, NONBLOCKING)
] + [
    ("peer killed, NVLink, torch's defaults", "killed", "", {}),
    ("peer killed, NVLink, ours", "killed", "", OURS),
    ("peer killed, sockets, torch's defaults", "killed", "", SOCKETS),
    ("peer killed, sockets, ours", "killed", "", SOCKETS | OURS),
    ("abort under a collective, join behind, new group", "abort", "", OURS),
    ("abort under a collective, join behind, new group, non-blocking", "abort", "", OURS | NONBLOCKING),
]


def run_case(number: int, title: str, kind: str, how: str, env: dict[str, str]) -> dict:
    port = str(24600 + number)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, kind, how, str(rank), port],
            env=os.environ | env | {"TORCH_CPP_LOG_LEVEL": "error", "NCCL_NVLS_ENABLE": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said: dict[int, dict] = {}
    began = time.monotonic()
    for rank, process in enumerate(ranks):
        try:
            out = process.communicate(timeout=max(1.0, DEADLINE_S - (time.monotonic() - began)))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            out = process.communicate()[0]
        lines = [json.loads(line[3:]) for line in out.splitlines() if line.startswith("@@ ")]
        tail = [line for line in out.splitlines() if not line.startswith("@@ ")][-3:]
        said[rank] = {"exit": process.returncode, "said": lines, "tail": [t[:160] for t in tail]}
    return {"case": title, "ranks": said}


def say(**facts: object) -> None:
    print("@@ " + json.dumps(facts), flush=True)


def rank_main(kind: str, how: str, rank: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))

    def init(name: str, eager: bool) -> None:
        dist.init_process_group(
            "nccl", store=dist.PrefixStore(name, store), rank=rank, world_size=2, timeout=timedelta(seconds=300),
            device_id=device if eager else None,
        )  # fmt: skip

    def abort_all(note: str) -> None:
        began = time.monotonic()
        world = dist.distributed_c10d._world
        for group in list(world.pg_map):
            try:
                group._get_backend(device).abort()
            except Exception as error:
                say(abort_error=str(error)[:200])
        say(note=note, abort_s=round(time.monotonic() - began, 3))

    x = torch.ones(1 << 20, device=device)
    torch.cuda.synchronize()
    if kind == "creation":
        creation(how, rank, init, abort_all, x)
    elif kind == "killed":
        killed(rank, init, abort_all, x)
    else:
        aborted(rank, init, x, device)


def creation(how, rank, init, abort_all, x) -> None:
    """Rank 1 never takes part in the communicator that rank 0 is creating."""
    import torch
    import torch.distributed as dist

    if how == "eager" and rank == 1:
        time.sleep(12)
        return
    if how != "eager":
        init("a", False)
    if how == "new_group":
        dist.all_reduce(x)
        torch.cuda.synchronize()
    if rank == 1:
        time.sleep(12)
        return
    threading.Timer(3.0, abort_all, ["monitor"]).start()
    began = time.monotonic()
    try:
        if how == "eager":
            init("a", True)
        group = dist.new_group([0, 1], use_local_synchronization=True) if how == "new_group" else None
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        say(left="returned", seconds=round(time.monotonic() - began, 3))
    except Exception as error:
        say(left="raised", seconds=round(time.monotonic() - began, 3), error=str(error)[:200])
    os._exit(0)


def killed(rank, init, abort_all, x) -> None:
    """Rank 1 dies in a loop of collectives: does rank 0's process live on, and can it be unblocked?"""
    import torch
    import torch.distributed as dist

    init("a", False)
    for _ in range(10):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(8.0, abort_all, ["monitor"]).start()
    began = time.monotonic()
    try:
        for _ in range(100000):
            dist.all_reduce(x)
            torch.cuda.synchronize()
        say(left="returned")
    except Exception as error:
        say(left="raised", seconds=round(time.monotonic() - began, 3), error=str(error)[:200])
    say(alive_after_s=round(time.monotonic() - began, 3))
    time.sleep(2)
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    say(context="usable")
    os._exit(0)


def aborted(rank, init, x, device) -> None:
    """Both abort from a thread while the main thread waits; the join ends behind; the next group starts at once."""
    import torch
    import torch.distributed as dist

    for generation in range(4):
        began = time.monotonic()
        init(f"g{generation}", False)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        made = time.monotonic()
        say(generation=generation, group_and_first_s=round(made - began, 3))
        backend = dist.distributed_c10d._get_default_group()._get_backend(device)
        joined = threading.Event()

        def end(backend=backend, joined=joined) -> None:
            start = time.monotonic()
            backend.abort()
            say(join_s=round(time.monotonic() - start, 3))
            joined.set()

        threading.Timer(0.3, end).start()
        began = time.monotonic()
        if rank == 0:
            dist.all_reduce(x)  # rank 1 does not come
        try:
            torch.cuda.synchronize()
        except Exception as error:
            say(sync_error=str(error)[:120])
        say(unblocked_s=round(time.monotonic() - began - 0.3, 3))
        began = time.monotonic()
        if generation % 2:
            joined.wait(5)
        world = dist.distributed_c10d
        world._update_default_pg(None)
        world._world.pg_map.clear()
        world._world.pg_names.clear()
        world._world.pg_group_ranks.clear()
        world._world.pg_backend_config.clear()
        world._world.pg_to_tag.clear()
        world._world.tags_to_pg.clear()
        world._world.group_count = 0
        torch._C._distributed_c10d._unregister_all_process_groups()
        say(forgot_s=round(time.monotonic() - began, 3), joined=joined.is_set())
    time.sleep(1.5)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        for number, case in enumerate(CASES):
            print(json.dumps(run_case(number, *case)), flush=True)
