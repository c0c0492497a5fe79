"""Whatever was made of process groups is left clean: the next generation builds it anew and trains as fresh ones do."""

import time
import warnings

import pytest

pytestmark = pytest.mark.procs
STEPS = 3


def model_of(torch):
    torch.manual_seed(11)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))


def groups(torch, dist):
    """A default group, and several that overlap; each rank uses all that it is in."""
    world = dist.get_world_size()
    made = [dist.new_group([r, (r + 1) % world]) for r in range(world if world > 2 else 1)]
    made += [dist.new_group(list(range(world))) for _ in range(3)]
    mine = [g for g in made if dist.get_rank(g) >= 0]
    model = model_of(torch)

    def reduce():
        for n, group in enumerate(mine):
            total = torch.ones(1) * (n + 1)
            dist.all_reduce(total, group=group)
            model[0].bias.grad += total.sum()

    return model, reduce


def mesh(torch, dist):
    """Two dimensions where there are four ranks, one and a flattened one where there are two."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    shape = (2, world // 2)
    made = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    model = model_of(torch)

    def reduce():
        for name in ("outer", "inner"):
            total = torch.ones(1)
            dist.all_reduce(total, group=made.get_group(name))
            model[0].bias.grad += total.sum()

    return model, reduce


def tensors(torch, dist):
    """DTensor's own: a tensor-parallel pair of layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(model_of(torch), made, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, lambda: None


def ddp(torch, dist):
    """DDP, with a sub-group of its own and a hook on its communication."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = dist.new_group(list(range(dist.get_world_size())))
    model = torch.nn.parallel.DistributedDataParallel(model_of(torch), process_group=group, find_unused_parameters=True)
    model.register_comm_hook(group, default_hooks.allreduce_hook)
    return model, lambda: None


def fsdp1(torch, dist):
    """The older FSDP, flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model_of(torch), device_id=torch.device("cpu"), use_orig_params=True), lambda: None


def fsdp2(torch, dist):
    """`fully_shard`, each layer and the whole; over two dimensions (HSDP) where there are four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    shape, names = ((2, 2), ("replicate", "shard")) if world == 4 else ((world,), ("shard",))
    made = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = model_of(torch)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=made)
    return fully_shard(model, mesh=made), lambda: None


KINDS = {"groups": groups, "mesh": mesh, "tensors": tensors, "ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}


def train(kind, rank, stand=None):
    """Some steps; exact losses. `stand(step, where)` may hang."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, reduce = KINDS[kind](torch, dist)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + (rank if kind not in ("tensors", "groups", "mesh") else 0))
        if stand is not None:
            stand(step, "forward")
        loss = model(torch.randn(4, 16)).square().mean()
        if stand is not None:
            stand(step, "backward")
        loss.backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    total = torch.tensor([float(sum(float.fromhex(x) for x in losses))], dtype=torch.float64)
    dist.all_reduce(total)
    return [losses, total.item().hex()]


def generations(rank, port, kind, world, times):
    """Hang in one generation after another (rank 0 asleep, the others in what waits for it), then train to the end."""
    from small import At, Small

    warnings.simplefilter("ignore", FutureWarning)  # FSDP1 is told to be old
    small, store, dirt = Small(), ("127.0.0.1", port), []
    for generation in range(times):
        where = ("forward", "backward")[generation % 2]

        def stand(step, here, where=where):
            if step == 1 and here == where:
                small.ready.set()
                if rank == 0:
                    time.sleep(600)

        def attempt(stand=stand):
            train(kind, rank, stand)
            time.sleep(600)

        small.stop(At(generation, rank, world, store), attempt)
        dirt += small.dirt
    told = small.run(At(times, rank, world, store), lambda: train(kind, rank))
    small.cleaning.close()
    return {"told": told, "dirt": dirt}


FOUR = pytest.mark.long
CELLS = [(kind, world) for world in (2, 4) for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "world"), [pytest.param(k, w, id=f"{k}-{w}", marks=[FOUR] if w == 4 else []) for k, w in CELLS]
)
def test_the_next_generation_builds_it_anew_and_trains_as_fresh_processes_do(forks, kind, world):
    fresh = forks.run(generations, ranks=world, kind=kind, world=world, times=0)
    again = forks.run(generations, ranks=world, kind=kind, world=world, times=2)
    assert [each["dirt"] for each in again] == [[]] * world
    assert [each["told"] for each in again] == [each["told"] for each in fresh]
    assert len({each["told"][1] for each in again}) == 1
