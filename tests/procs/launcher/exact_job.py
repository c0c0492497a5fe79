"""The job of the matrix of exactness, behind the head that every job of these tests has.

FSDP2 or DDP, AdamW, a scheduler that changes the rate at every step, dropout that differs by rank, shuffled data. Its
faults come from the environment's PLAN, once each, inside the step: after the backward, before the optimizer's step.
"""
# ruff: noqa: F821

import hashlib
import json

from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.checkpoint import snapshot
from everstep.data import GlobalSampler

PARALLEL, STEPS = os.environ["PARALLEL"], int(os.environ["STEPS"])
PLAN = json.loads(os.environ["PLAN"])
SAMPLES, BATCH, WIDE = 96, 4, 61

FAULTS = {
    "exception": lambda: 1 / 0,
    "hang in sleep": lambda: time.sleep(1000),
    "hang in C": lambda: ctypes.CDLL(None).sleep(1000),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGKILL of rank 0": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "held GIL": lambda: ctypes.PyDLL(None).sleep(1000),
}


def once(number):
    try:
        os.close(os.open(f"fired-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    note("fault", kind=PLAN[number][0], number=number)
    return True


def inside(run, step):
    for number, (kind, rank, at) in enumerate(PLAN):
        if kind in FAULTS and (rank, at) == (run.rank, step) and once(number):
            FAULTS[kind]()


def take(self, step, hold=False, real=snapshot.Snapshotter.take):
    """A kill during a save: in the midst of the snapshot that the disk tier has asked for."""
    for number, (kind, rank, at) in enumerate(PLAN):
        if kind == "SIGKILL during a save" and hold and rank == self.rank and step >= at and once(number):
            snapshot.seal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return real(self, step, hold)


snapshot.Snapshotter.take = take


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randn(SAMPLES, WIDE, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, self.rows[index]


def build():
    torch.manual_seed(7)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Dropout(0.1))])
    if PARALLEL == "FSDP2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:  # one layout of buckets for all steps (B1)
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def local(value):
    return (value.to_local() if hasattr(value, "to_local") else value).detach().contiguous().numpy().tobytes()


@everstep.resilient
def train(run):
    torch.set_num_threads(1)
    model, optimizer, scheduler = build()
    loader = StatefulDataLoader(Rows(), batch_size=BATCH, sampler=GlobalSampler(SAMPLES, shuffle=True, seed=5))
    torch.manual_seed(100 + run.rank)
    for step, (rows, batch) in run.steps(STEPS, loader, model=model, optimizer=optimizer, scheduler=scheduler):
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        inside(run, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        note("step", step=step, loss=loss.item().hex(), rows=rows.tolist(), lr=scheduler.get_last_lr()[0].hex())
    held = [*model.parameters(), *(v for entry in optimizer.state.values() for v in entry.values())]
    note("end", state=hashlib.sha256(b"".join(map(local, held))).hexdigest())


train()
