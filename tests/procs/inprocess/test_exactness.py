"""What bit-exactness hangs on (B1, B2): the layout of DDP's buckets and the number of threads."""

import hashlib

import pytest

pytestmark = pytest.mark.procs
STEPS, REBUILT_AT = 8, 4
KINDS = {
    "ddp": {},
    "ddp, static graph": {"static_graph": True},
    "ddp, one layout of buckets": {"find_unused_parameters": True},
    "fsdp2": None,
    "hsdp": None,
}


def trained(dist, kind, rebuilt, group_of):
    """Train some steps; where `rebuilt`, make model and optimizer anew in the middle, with their state restored."""
    import torch
    from torch import nn

    def build():
        torch.manual_seed(7)
        model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(61, 61), nn.Tanh())])
        options = KINDS[kind]
        if options is None:
            from torch.distributed.fsdp import fully_shard

            shape = (2, 2) if kind == "hsdp" else (dist.get_world_size(),)
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            model = fully_shard(model, mesh=mesh)
        else:
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.03, process_group=group_of(), **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build()
    losses = []
    for step in range(1, STEPS + 1):
        torch.manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(16, 61)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if rebuilt and step == REBUILT_AT:
            kept = [p.detach().clone() for p in model.parameters()]
            moments = optimizer.state_dict()
            model, optimizer = build()
            with torch.no_grad():
                for live, saved in zip(model.parameters(), kept, strict=True):
                    live.copy_(saved)
            optimizer.load_state_dict(moments)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in local)
    return [losses, hashlib.sha256(weights).hexdigest()]


def rebuilt_and_not(rank, port, world, kinds):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    told = {kind: [trained(dist, kind, rebuilt, dist.new_group) for rebuilt in (False, True)] for kind in kinds}
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rebuilt_ddp_goes_on_exactly_only_with_one_layout_of_buckets(forks, world):
    """E22. Two ranks add alike in either order; from three on the order counts, and a fresh DDP has another one."""
    kinds = [kind for kind in KINDS if kind != "hsdp" or world == 4]
    told = forks.run(rebuilt_and_not, ranks=world, world=world, kinds=kinds)
    for kind in kinds:
        equal = [whole == rebuilt for whole, rebuilt in (each[kind] for each in told)]
        parts = world > 2 and kind in ("ddp", "ddp, static graph")
        assert equal == [not parts] * world, kind
    if world > 2:
        whole, rebuilt = told[0]["ddp"]
        first = next(n for n, (a, b) in enumerate(zip(whole[0], rebuilt[0], strict=True), 1) if a != b)
        assert first > REBUILT_AT, "up to the rebuild it is one and the same run"


def sums(rank, port, threads):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    a, b = torch.randn(1 << 20), torch.randn(257, 1031)
    told = {"sum": a.sum(), "matmul": b @ b.T, "layer_norm": torch.nn.functional.layer_norm(b.T, (257,))}
    told["layer_norm"] = told["layer_norm"].sum()
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in told.items()}


def test_another_number_of_threads_gives_other_bits(forks):
    """E25: why every worker is given the same number, and a survivor that changed it is given it back."""
    one, again, two = (forks.run(sums, ranks=1, threads=n)[0] for n in (1, 1, 2))
    assert one == again
    assert {"sum", "layer_norm"} <= {name for name in one if one[name] != two[name]}
