# A training script as users of NVRx 0.4.1 write it: FSDP2, checkpoints by DCP and on the node's disk through one queue,
# a file of each rank's own, all in the background, under the in-process restart. Its test changes the imports by the
# one command that docs/compat-nvrx.md gives, and nothing else. With --wound rank 1 fails while its saves are under way.
import argparse
import datetime
import json
import os
import signal

import nvidia_resiliency_ext.inprocess as inprocess
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    init_checkpoint_metadata_cache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import LazyCliqueReplicationStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

INTERVAL = 5


def note(what, **facts):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n")


def save_by_dcp(queue, model, path):
    writer = FileSystemWriterAsync(path, thread_count=2)
    planned = save_state_dict_async_plan(model.state_dict(), writer, None, 0, enable_cache=True)
    save_fn, preload_fn, save_args = writer.get_save_function_and_args()

    def finalize():
        save_state_dict_async_finalize(*planned)
        dist.barrier()

    queue.schedule_async_request(AsyncRequest(save_fn, save_args, [finalize], preload_fn=preload_fn))


def hurt(args, iteration, rank, step):
    """The saves of this step are under way, and stay so: their workers stand still."""
    if not args.wound or iteration or rank != 1:
        return
    for child in psutil.Process().children():
        child.send_signal(signal.SIGSTOP)
    note("wounded", step=step)


def train(args, call_wrapper: inprocess.CallWrapper = None):  # noqa: PLR0915 - as they write it
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))
    model = fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    queue, own = AsyncCallsQueue(persistent=True), TorchAsyncCheckpoint(persistent_queue=True)
    strategy = LazyCliqueReplicationStrategy(replication_jump=1, replication_factor=2)
    manager = LocalCheckpointManager(f"{args.dir}/node{rank}", session_id="job", repl_strategy=strategy)
    init_checkpoint_metadata_cache()
    first = max(0, manager.find_latest())
    if first:
        state, _ = manager.load()
        model.load_state_dict(state.state_dict)
    note("begun", rank=rank, iteration=call_wrapper.iteration, first=first, there=sorted(os.listdir(args.dir)))

    for step in range(first + 1, args.steps + 1):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(4, 6)).square().sum()
        loss.backward()
        optimizer.step()
        queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        own.finalize_async_save(blocking=False, no_dist=True)
        note("step", rank=rank, step=step, loss=loss.item().hex())
        if step % INTERVAL:
            continue
        if step == 2 * INTERVAL:
            queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
            own.finalize_async_save(blocking=True, no_dist=True)
            hurt(args, call_wrapper.iteration, rank, step)
        queue.schedule_async_request(manager.save(BasicTensorAwareStateDict(model.state_dict()), step, is_async=True))
        save_by_dcp(queue, model, f"{args.dir}/step-{step}")
        own.async_save({"step": step, "optimizer": optimizer.state_dict()}, f"{args.dir}/rank{rank}.pt")
        if args.wound and step == 2 * INTERVAL and call_wrapper.iteration == 0 and rank == 1:
            raise RuntimeError("a fault while saves are under way")
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    own.finalize_async_save(blocking=True, no_dist=True, terminate=True)
    queue.close()

    loaded = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(f"{args.dir}/step-{args.steps}"))
    same = all(torch.equal(loaded[name].to_local(), value.to_local()) for name, value in model.state_dict().items())
    note("loaded", rank=rank, same=same, own=torch.load(f"{args.dir}/rank{rank}.pt")["step"])
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--wound", action="store_true")
    args = parser.parse_args()
    os.makedirs(args.dir, exist_ok=True)
    wrapped = inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(max_iterations=4, min_world_size=1),
        abort=inprocess.abort.AbortTorchDistributed(),
        health_check=inprocess.health_check.CudaHealthCheck(),
        soft_timeout=datetime.timedelta(seconds=60),
        hard_timeout=datetime.timedelta(seconds=90),
    )(train)
    wrapped(args)


if __name__ == "__main__":
    main()
