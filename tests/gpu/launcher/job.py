"""A job with its state on a GPU, behind the head that every job of these tests has.

PARALLEL is FSDP2 or DDP; AdamW, a scheduler, dropout that differs by rank, a counting buffer in each layer.
Faults come from PLAN, once each, inside the step: after the backward, before the optimizer's step. With SHARED ranks
share one GPU over NCCL: NCCL refuses that within a host, so each says that it is a host of its own.
"""
# ruff: noqa: F821

import hashlib
import json

from torch import nn
from torch.distributed.fsdp import fully_shard

PARALLEL, BACKEND, STEPS = os.environ["PARALLEL"], os.environ["BACKEND"], int(os.environ["STEPS"])
SHARED, PLAN = bool(os.environ.get("SHARED")), json.loads(os.environ["PLAN"])
WIDE = 256
if SHARED:
    import everstep.training.member as member

    os.environ.update({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"})
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    member.device_of = lambda *_: torch.device("cuda", 0)


def lose_the_context():
    torch.ones(1, device="cuda")[torch.full((1,), 2**40, device="cuda", dtype=torch.int64)] = 0
    torch.cuda.synchronize()


def hold_the_interpreter():
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while True:
        libc.pthread_mutex_lock(lock)


def wait_for_the_device():
    for _ in range(40):
        torch.cuda._sleep(50_000_000_000)  # each half a minute of spinning
    torch.cuda.synchronize()


FAULTS = {
    "exception": lambda: 1 / 0,
    "hang in sleep": lambda: time.sleep(1000),
    "hang in C": lambda: ctypes.CDLL(None).sleep(1000),
    "hang in synchronize": wait_for_the_device,
    "lost context": lose_the_context,
    "out of memory": lambda: torch.empty(1 << 50, device="cuda"),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "held GIL": hold_the_interpreter,
}


def inside(run, step):
    for number, (kind, rank, at) in enumerate(PLAN):
        if (rank % run.world_size, at) == (run.rank, step):
            try:
                os.close(os.open(f"fired-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            note("fault", kind=kind, number=number)
            FAULTS[kind]()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


def build(device):
    torch.manual_seed(7)
    model = nn.Sequential(*[Layer() for _ in range(6)]).to(device)
    if PARALLEL == "FSDP2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:  # one layout of buckets for all steps (B1)
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def local(value):
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.detach().cpu().contiguous().numpy().tobytes()


@everstep.resilient(backend=BACKEND, exact=True)
def train(run):
    if SHARED:
        os.environ["NCCL_HOSTID"] = f"host-{run.rank}"
    device = run.device
    assert device.type == "cuda"
    model, optimizer, scheduler = build(device)
    torch.manual_seed(100 + run.rank)
    torch.cuda.manual_seed(200 + run.rank)
    note("enter", generation=run.generation)
    for step in run.steps(STEPS, model=model, optimizer=optimizer, scheduler=scheduler):
        batch = torch.randn(16, WIDE, device=device)
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        inside(run, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        note("step", step=step, loss=loss.item().hex())
    held = [*model.parameters(), *model.buffers(), *(v for e in optimizer.state.values() for v in e.values())]
    note("end", state=hashlib.sha256(b"".join(map(local, held))).hexdigest())


train()
