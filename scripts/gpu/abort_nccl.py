"""Leaving NCCL collectives on two GPUs: interrupt, abort, clean, meet again. One JSON line a generation and rank.

usage: PYTHONPATH=src python scripts/gpu/abort_nccl.py
"""

import json
import os
import subprocess
import sys
import threading
import time

WORLD, GENERATIONS, DEADLINE_S = 2, 4, 90.0
OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


class At:
    """One generation."""

    epoch, world_size = 0, WORLD

    def __init__(self, generation: int, rank: int, port: int) -> None:
        self.generation, self.rank, self.store = generation, rank, ("127.0.0.1", port)


def rank_main(rank: int, port: int) -> None:
    """Several generations; in each but the last, rank 1 waits in a collective that rank 0 never enters."""
    import torch
    import torch.distributed as dist

    from everstep.inprocess import reset
    from everstep.inprocess.communication import Communication
    from everstep.inprocess.interrupt import Interrupter
    from everstep.inprocess.rendezvous import Meeting

    torch.cuda.set_device(rank)
    communication, interrupter = Communication(), Interrupter()
    meeting = Meeting(communication)
    communication.watch()
    baseline = reset.record()
    for generation in range(GENERATIONS):
        at, told, ready = At(generation, rank, port), {"generation": generation, "rank": rank}, threading.Event()
        last = generation == GENERATIONS - 1

        def function(at=at, told=told, ready=ready, last=last):
            began = time.monotonic()
            meeting.init_process_group("nccl", device_id=torch.device("cuda", rank) if at.generation % 2 else None)
            sub = dist.new_group(list(range(WORLD)))
            one = torch.ones(1, device="cuda")
            dist.all_reduce(one)
            dist.all_reduce(one, group=sub)
            torch.cuda.synchronize()
            told["meet_s"], told["sum"] = time.monotonic() - began, one.item()
            ready.set()
            if last:
                return
            if rank == 0:
                time.sleep(60)
            dist.all_reduce(one)
            dist.all_reduce(one, group=sub)
            torch.cuda.synchronize()

        def outside(at=at, told=told, ready=ready):
            ready.wait(60)
            time.sleep(0.5)
            told["stopped"] = time.monotonic()
            interrupter.interrupt(at.generation)
            done = communication.abort(3.0)
            told["abort"] = [round(done.seconds, 3), *map(list, (done.backends, done.late, done.failed))]

        thread = threading.Thread(target=outside)
        if not last:
            thread.start()
        try:
            with meeting.entered(at):
                interrupter.call(generation, function)
        except BaseException as error:
            told["came"] = type(error).__name__
        left = time.monotonic()
        if not last:
            thread.join()
            told["left_s"] = left - told.pop("stopped")
        began = time.monotonic()
        communication.finish()
        meeting.leave()
        reset.restore(baseline)
        told["clean_s"], told["dirt"] = time.monotonic() - began, list(reset.fingerprint(baseline))
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in told.items()}), flush=True)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Start a store and the ranks; kill what is late."""
    import torch
    import torch.distributed as dist

    print(torch.__version__, torch.cuda.device_count(), flush=True)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(store.port)], env={**os.environ, **OURS})
        for rank in range(WORLD)
    ]
    until = time.monotonic() + DEADLINE_S
    for process in ranks:
        try:
            print("exit", process.wait(max(0.1, until - time.monotonic())), flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print("late: killed", flush=True)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else main()
