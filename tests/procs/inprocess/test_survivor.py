"""P9: whoever was interrupted anywhere meets a fresh process, and trains with it bit for bit as fresh ones do."""

import time

import pytest

pytestmark = pytest.mark.procs
STEPS = 4


def build(torch, kind):
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(torch, model, optimizer, rank, number, before=lambda _: None):
    torch.manual_seed(1000 * number + rank)
    before("forward")
    loss = model(torch.randn(8, 32)).square().mean()
    before("backward")
    loss.backward()
    before("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(kind, rank):
    """Make groups by the environment's words, as scripts do; return exact losses and a sum over the weights."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    sub = dist.new_group(list(range(dist.get_world_size())))
    model, optimizer = build(torch, kind)
    losses = [step(torch, model, optimizer, rank, number).hex() for number in range(STEPS)]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    weight = sum(p.detach().double().sum().item() for p in local if p.numel())
    total = torch.tensor([weight], dtype=torch.float64)
    dist.all_reduce(total, group=sub)
    return [losses, total.item().hex(), str(torch.get_default_dtype()), dist.get_rank()]


def disturb(small, phase, kind, rank):
    """Stand in `phase` for ever: rank 0 inside it, rank 1 asleep beside it."""
    import torch
    import torch.distributed as dist

    def stand(here):
        if here == phase:
            small.ready.set()
            if rank == 1:
                time.sleep(60)

    stand("init_process_group")
    dist.init_process_group("gloo")
    stand("sleep")
    stand("new_group")
    group = dist.new_group([0, 1])
    stand("all_reduce")
    dist.all_reduce(torch.ones(4), group=group)
    stand("barrier")
    dist.barrier()
    model, optimizer = build(torch, kind)
    with torch.autocast("cpu"), torch.device("cpu"):
        step(torch, model, optimizer, rank, 0)
        step(torch, model, optimizer, rank, 1, stand)
    if phase == "after destroy":
        dist.destroy_process_group()
        stand("after destroy")
    small.ready.set()
    time.sleep(60)


def two_survivors_and_one_fresh(rank, port, phase, kind):
    from small import At, Small

    small, store = Small(), ("127.0.0.1", port)
    if phase and rank < 2:
        at = At(0, rank, 2, store)
        small.stop(at, lambda: disturb(small, phase, kind, rank))
    at = At(1, rank, 3, store)
    told = small.run(at, lambda: train(kind, rank))
    small.cleaning.close()
    return {"trained": told, "left_s": small.left_s, "cleaned_s": small.cleaned_s, "dirt": list(small.dirt)}


@pytest.fixture(scope="module")
def fresh(forks):
    """What three fresh processes train, by kind."""
    return {kind: forks.run(two_survivors_and_one_fresh, ranks=3, phase="", kind=kind) for kind in ("fsdp", "ddp")}


PHASES = [
    "init_process_group",
    "new_group",
    "all_reduce",
    "barrier",
    "forward",
    "backward",
    "optimizer",
    "after destroy",
    "sleep",
]


SELDOM = ("all_reduce", "barrier", "sleep")  # the same waits, and what ends them, are in test_abort.py


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        *[pytest.param("fsdp", phase, marks=[pytest.mark.long] if phase in SELDOM else []) for phase in PHASES],
        pytest.param("ddp", "forward", marks=pytest.mark.long),
        ("ddp", "backward"),
    ],
)
def test_a_survivor_trains_with_a_fresh_process(forks, fresh, phase, kind):
    told = forks.run(two_survivors_and_one_fresh, ranks=3, phase=phase, kind=kind)
    for rank, each in enumerate(told):
        assert each["dirt"] == []
        assert each["trained"] == fresh[kind][rank]["trained"]
    assert told[0]["left_s"] < 1.0
