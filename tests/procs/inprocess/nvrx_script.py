# A training script as users of NVRx 0.4.1 wrote it: own store on a second port, a PrefixStore per iteration, callbacks
# composed, a checkpoint written inside atomic(). Its test changes the imports with sed, and nothing else.
from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import time
from typing import Optional  # as they wrote it

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.tools.inject_fault import InjectedException


def note(what, **facts):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **facts}) + "\n")


class Told(inprocess.initialize.Initialize):
    def __call__(self, state):
        note("initialize", rank=state.rank, iteration=state.iteration, world=state.world_size)
        return state


def clean_up(text):
    note("finalize", text=text)


def hurt(iteration, rank, done):
    if done != 2:
        return
    if (iteration, rank) == (0, 1):
        raise InjectedException("first")
    if (iteration, rank) == (1, 0):
        raise RuntimeError("second, on rank 0")
    if (iteration, rank) == (2, 1):
        time.sleep(3600)
    if (iteration, rank) == (3, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def train(base_store, args, call_wrapper: Optional[inprocess.CallWrapper] = None):  # noqa: UP045 - as they wrote it
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note("enter", rank=rank, iteration=call_wrapper.iteration)
    random.seed(rank)
    store = dist.PrefixStore(str(call_wrapper.iteration), base_store)
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size, timeout=args.timeout)
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if os.path.exists(args.checkpoint):
        first, saved = torch.load(args.checkpoint)
        model.load_state_dict(saved)
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        hurt(call_wrapper.iteration, rank, step - first)
        optimizer.step()
        call_wrapper.ping()
        if rank == 0:
            with call_wrapper.atomic():
                torch.save((step + 1, model.state_dict()), args.checkpoint + ".new")
                os.replace(args.checkpoint + ".new", args.checkpoint)
        note("step", rank=rank, step=step, iteration=call_wrapper.iteration, loss=loss.item())
        dist.barrier()
    dist.destroy_process_group()
    return rank


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", default="model.pt")
    args = parser.parse_args()
    args.timeout = datetime.timedelta(seconds=60)
    seconds = lambda n: datetime.timedelta(seconds=n)  # noqa: E731
    base = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["OWN_PORT"]), int(os.environ["WORLD_SIZE"]),
        int(os.environ["RANK"]) == 0, multi_tenant=True, wait_for_workers=False, use_libuv=True,
    )  # fmt: skip
    wrapped = inprocess.Wrapper(
        store_kwargs={"timeout": seconds(30), "port": int(os.environ["OWN_PORT"]) + 1},
        initialize=inprocess.Compose(Told(), inprocess.initialize.RetryController(max_iterations=6, min_world_size=1)),
        abort=inprocess.Compose(inprocess.abort.AbortTransformerEngine(), inprocess.abort.AbortTorchDistributed()),
        finalize=inprocess.finalize.ThreadedFinalize(timeout=seconds(10), fn=clean_up, args=("done",)),
        health_check=inprocess.Compose(
            inprocess.health_check.CudaHealthCheck(timeout=seconds(10)),
            inprocess.health_check.FaultCounter(max_rank_faults=3),
        ),
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(), inprocess.rank_assignment.ShiftRanks()
        ),
        monitor_thread_interval=seconds(0.1),
        monitor_process_interval=seconds(0.1),
        heartbeat_interval=seconds(0.5),
        progress_watchdog_interval=seconds(0.1),
        soft_timeout=seconds(2),
        hard_timeout=seconds(20),
        barrier_timeout=seconds(60),
        last_call_wait=seconds(0.1),
        termination_grace_time=seconds(1),
    )(train)
    note("returned", value=wrapped(base, args))


if __name__ == "__main__":
    main()
