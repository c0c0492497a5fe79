"""Three ranks use NVRx's checkpoint names as its guide says, over gloo, and things go wrong. Usage: script DIR.

One process imports torch and forks all ranks; it runs no tensor operation itself.
"""

import gc
import glob
import os
import shutil
import sys
import time
import traceback
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from everstep.checkpoint.async_ckpt.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from everstep.checkpoint.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from everstep.checkpoint.async_ckpt.filesystem_async import FileSystemWriterAsync
from everstep.checkpoint.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from everstep.checkpoint.dcp_storage import FileSystemReader, FileSystemWriter
from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from everstep.checkpoint.local.ckpt_managers.local_manager import LocalCheckpointManager
from everstep.checkpoint.local.replication.strategies import LazyCliqueReplicationStrategy
from everstep.errors import CheckpointError

warnings.filterwarnings("ignore")
WHERE = sys.argv[1]
WHOLE = torch.arange


def raised(kind, act):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("went on as if nothing had happened")


def state(mesh, k=0):
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = LocalShard.from_tensor_and_offsets(torch.full((2, 3), float(rank + k)), [2 * rank, 0], rank)
    return {
        "w": distribute_tensor(WHOLE(30.0).view(10, 3) + k, mesh, [Shard(0)]),  # uneven over three
        "few": distribute_tensor(WHOLE(6.0).view(2, 3) + k, mesh, [Shard(0)]),  # the last rank has none of it
        "sharded": init_from_local_shards([shard], [2 * world, 3]),
        "plain": torch.ones(4) * k, "step": k,
    }  # fmt: skip


def schedule(queue, made, path, **kwargs):
    planned = save_state_dict_async_plan(made, FileSystemWriterAsync(path, thread_count=2), **kwargs)
    fn, preload, args = planned[0].get_save_function_and_args()
    return fn, args, partial(save_state_dict_async_finalize, *planned), preload


def dcp_in_the_background(rank, mesh):
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for k in range(3):
        made = state(mesh, k)
        fn, args, finalize, preload = schedule(
            queue, made, f"{WHERE}/step-{k}", enable_cache=True, metadata_cache=cache
        )
        queue.schedule_async_request(AsyncRequest(fn, args, [finalize], preload_fn=preload))
        made["w"].zero_()
        made["plain"].zero_()
        assert not os.path.exists(f"{WHERE}/step-{k}")
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
            time.sleep(0.01)
        assert cache.get_metadata_caching_status()[0] == (k > 0)
    for reader in (CachedMetadataFileSystemReader, FileSystemReader, dcp.FileSystemReader):
        into = state(mesh, 100)
        dcp.load(into, storage_reader=reader(f"{WHERE}/step-2"))
        assert torch.equal(into["w"].full_tensor(), WHOLE(30.0).view(10, 3) + 2)
        assert torch.equal(into["few"].full_tensor(), WHOLE(6.0).view(2, 3) + 2)
        assert into["sharded"].local_shards()[0].tensor.eq(rank + 2).all()
        assert (into["plain"].tolist(), into["step"]) == ([2.0] * 4, 2)
    changed = state(mesh, 5) | {"more": torch.ones(2)}
    fn, args, finalize, preload = schedule(queue, changed, f"{WHERE}/step-5", enable_cache=True, metadata_cache=cache)
    queue.schedule_async_request(AsyncRequest(fn, args, [finalize], preload_fn=preload))
    queue.maybe_finalize_async_calls(blocking=True)
    into = {"more": torch.zeros(2)}
    dcp.load(into, storage_reader=FileSystemReader(f"{WHERE}/step-5"))
    assert into["more"].sum() == 2, "the plan of a state that had changed was used again"
    a_process_that_was_replaced_has_no_plan(rank, mesh, queue, cache)
    return queue


def a_process_that_was_replaced_has_no_plan(rank, mesh, queue, cache):
    """After a restart: rank 1 is another process, and the others, which were kept, make their cache anew too."""
    if rank == 1:
        cache = CheckpointMetadataCache()
    for k in (5, 6):
        made = state(mesh, k)
        cache.set_cached_global_metadata(None)
        fn, args, finalize, preload = schedule(queue, made, f"{WHERE}/step-5", enable_cache=True, metadata_cache=cache)
        queue.schedule_async_request(AsyncRequest(fn, args, [finalize], preload_fn=preload))
        queue.maybe_finalize_async_calls(blocking=True)
        into = state(mesh, 100)
        dcp.load(into, storage_reader=FileSystemReader(f"{WHERE}/step-5"))
        assert into["step"] == k


def one_rank_fails(rank, mesh, queue):
    """A worker of rank 1 leaves; rank 2 has written nothing. All ranks hear of it, nothing is published."""
    fn, args, finalize, preload = schedule(queue, state(mesh, 6), f"{WHERE}/step-6")
    request = AsyncRequest(fn, args, [finalize], preload_fn=preload)
    queue.schedule_async_request(AsyncRequest(os._exit, (17,), []) if rank == 1 else request)
    told = raised(CheckpointError, lambda: queue.maybe_finalize_async_calls(blocking=True))
    assert "on rank 1" in told, told
    assert ("exit status 17" in told) == (rank == 1), told
    del fn, args, finalize, preload, request
    gc.collect()
    fn, args, finalize, preload = schedule(queue, state(mesh, 7), f"{WHERE}/step-7")
    queue.schedule_async_request(AsyncRequest(None if rank == 2 else fn, args, [finalize], preload_fn=preload))
    told = raised(CheckpointException, lambda: queue.maybe_finalize_async_calls(blocking=True))
    assert "has said nothing of it" in told, told
    del fn, args, finalize, preload
    gc.collect()
    dist.barrier()
    assert sorted(os.listdir(WHERE)) == ["step-0", "step-1", "step-2", "step-5"], os.listdir(WHERE)
    queue.close()


def dcp_save_itself(rank, mesh):
    dcp.save(state(mesh, 8), storage_writer=FileSystemWriter(f"{WHERE}/step-8"))
    made = state(mesh, 9)
    writing = dcp.async_save(made, storage_writer=FileSystemWriter(f"{WHERE}/step-8"), process_group=dist.new_group())
    made["w"].zero_()
    writing.result()
    into = state(mesh)
    dcp.load(into, storage_reader=FileSystemReader(f"{WHERE}/step-8"))
    assert torch.equal(into["w"].full_tensor(), WHOLE(30.0).view(10, 3) + 9)
    dist.barrier()
    assert [name for name in os.listdir(WHERE) if name.startswith(".")] == []


def manager(rank, **kwargs):
    return LocalCheckpointManager(f"{WHERE}/node{rank}", "job", LazyCliqueReplicationStrategy(1, 2), **kwargs)


def local(rank, mesh):
    """Iterations 1, 10⁷ and 2 · 10⁷ with copies in one group of three: two does not divide it."""
    queue, saver = AsyncCallsQueue(), manager(rank)
    assert saver.find_latest() == -1
    assert saver.save(BasicTensorAwareStateDict(state(mesh, 1)), 1) is None
    for iteration in (10_000_000, 20_000_000):
        made = state(mesh, iteration)
        request = saver.save(BasicTensorAwareStateDict(made), iteration, is_async=True)
        made["plain"].zero_()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    dist.barrier()
    kept = lambda: {name.split("_")[1] for name in os.listdir(saver.local_ckpt_dir)}  # noqa: E731
    until = time.monotonic() + 30
    while "0000001" in kept() and time.monotonic() < until:
        time.sleep(0.01)
    assert kept() == {"10000000", "20000000"}, kept()
    expect(rank, 20_000_000)
    wound(rank, {1}, "iter_20000000_1_local.pt", "flip")
    expect(rank, 20_000_000)  # from a copy, which was written back
    mine = glob.glob(f"{WHERE}/node1/job/1/iter_20000000_1_local.pt")
    wound(rank, {0, 2}, "iter_20000000_1_local.pt", "cut")
    assert len(mine) == 1
    expect(rank, 20_000_000)
    wound(rank, {0, 1, 2}, "iter_20000000_1_local.pt", "cut")
    expect(rank, 10_000_000)
    alone = LocalCheckpointManager(f"{WHERE}/node{rank}", "job")
    assert alone.find_latest() == 10_000_000
    assert alone.load()[1] == (10_000_000, rank, "job")


def wound(rank, nodes, name, how):
    dist.barrier()
    for path in glob.glob(f"{WHERE}/node{rank}/job/{rank}/{name}") if rank in nodes else ():
        if how == "cut":
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            with open(path, "r+b") as file:
                file.seek(os.path.getsize(path) // 3)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
    dist.barrier()


def expect(rank, iteration):
    loader = manager(rank)
    loader.find_latest()
    found, id_ = loader.load()
    assert id_ == (iteration, rank, "job"), id_
    assert found.state_dict["plain"].eq(iteration).all()
    assert found.state_dict["sharded"].local_shards()[0].tensor.eq(float(rank + iteration)).all()
    assert torch.equal(found.state_dict["w"].full_tensor(), WHOLE(30.0).view(10, 3) + iteration)
    assert [path for path in os.listdir(loader.local_ckpt_dir) if path.endswith(".tmp")] == []


def a_node_s_disk_is_emptied_or_cannot_be_read(rank, mesh):
    """Under a living process. Copies serve, and are put back; and one that cannot look is told to all, not awaited."""
    saver = manager(rank)
    saver.find_latest()
    for iteration in (30_000_000, 40_000_000):
        saver.save(BasicTensorAwareStateDict(state(mesh, iteration)), iteration)
        dist.barrier()
        if rank == 1:
            shutil.rmtree(saver.local_ckpt_dir)
        dist.barrier()
        assert saver.find_latest() == iteration
        expect(rank, iteration)
    folder = saver.local_ckpt_dir
    if rank == 1:
        folder.rename(f"{folder}.away")
        folder.touch()
    told = raised(CheckpointError, manager(rank).find_latest)
    assert "cannot be looked for: rank 1: " in told, told
    if rank == 1:
        folder.unlink()
        folder.with_name("1.away").rename(folder)
    dist.barrier()
    expect(rank, 40_000_000)


def another_world(rank, mesh):
    """Two ranks find what three have saved: it is refused with both numbers, never loaded."""
    loader = manager(rank)
    assert loader.find_latest() == -1
    told = raised(CheckpointError, loader.load)
    assert "a world of 3 ranks" in told, told
    assert "this world has 2" in told, told


def a_rank_dies(rank, mesh):
    """Nobody waits for a rank that has died, however it is asked."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(None, (), []))
    dist.barrier()
    if rank == 1:
        os._exit(0)
    for act in (lambda: queue.maybe_finalize_async_calls(blocking=True), lambda: manager(rank).find_latest()):
        assert "could not agree" in raised(CheckpointError, act)
    os._exit(0)


def one(rank, world, port, acts):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{WHERE}.store-{port}", world), rank=rank, world_size=world)
    mesh, carried = init_device_mesh("cpu", (world,)), ()
    for act in acts:
        begun = time.monotonic()
        given = act(rank, mesh, *carried)
        carried = (given,) if given is not None else ()
        if rank == 0:
            print(f"{act.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
    dist.destroy_process_group()


def worlds(world, port, *acts):
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                one(rank, world, port, acts)
                code = 0
            except BaseException:
                print(f"rank {rank}", traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * world, codes


if __name__ == "__main__":
    worlds(
        3, 1, dcp_in_the_background, one_rank_fails, dcp_save_itself, local,
        a_node_s_disk_is_emptied_or_cannot_be_read,
    )  # fmt: skip
    worlds(2, 2, another_world, a_rank_dies)
    print("all ranks agree")
