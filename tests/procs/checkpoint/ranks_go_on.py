"""Ranks that train together are killed and go on from memory: the losses must be the twin's, bit for bit.

usage: ranks_go_on.py FOLDER (ddp|fsdp2):WORLD_SIZE…        prints one JSON object
"""

import faulthandler
import hashlib
import json
import mmap
import os
import random
import signal
import sys

import torch
import torch._dynamo  # imported by the first optimizer step: once here instead of in every rank
import torch.distributed as dist
from small_agent import SmallAgent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.shelf import Shelf

STEPS = 12
DEATHS = {1: 4, 0: 8}  # rank: the step inside which it dies


class Model(nn.Module):
    """Dropout, BatchNorm, a tied pair, and parameters that shard unevenly: 5 rows, 1 row, 0-row shards."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.mid = nn.Linear(6, 6)
        self.one = nn.Linear(6, 1)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        hidden = nn.functional.dropout(self.mid(self.norm(self.emb(x))), 0.2)
        return self.head(hidden) + self.one(hidden)


def build(kind: str, rank: int, world: int) -> dict:
    torch.manual_seed(7)
    model: nn.Module = Model()
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # B1: one bucket layout
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    data = [torch.tensor([n % 5, (n * 3 + 1) % 5]) for n in range(8 * world)]
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "loader": StatefulDataLoader(data, batch_size=2, sampler=sampler),
    }


def train(kind: str, world: int, folder: str, attempt: str, dies: dict[int, int]):
    def body(snapshotter, link, rank):
        faulthandler.dump_traceback_later(80)  # in no process that forks: its child would wait for that thread
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=world)
        state = build(kind, rank, world)
        snapshotter.bind(state)
        recovered = snapshotter.restore()
        step = recovered.step if recovered else 0
        batches = iter(state["loader"])
        snapshotter.restore_generators()
        if recovered is None:
            torch.manual_seed(100 + rank)
            random.seed(200 + rank)  # a fork seeds Python's generator anew
            snapshotter.take(0)
        while step < STEPS:
            batch = next(batches, None)
            if batch is None:
                batches = iter(state["loader"])
                batch = next(batches)
            state["optimizer"].zero_grad()
            loss = state["model"](batch.flatten()).square().mean()
            loss.backward()
            if dies.get(rank) == step + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state["optimizer"].step()
            state["scheduler"].step()
            step += 1
            link.send({"kind": "loss", "step": step, "loss": loss.item().hex(), "batch": batch.tolist()})
            snapshotter.take(step)
        del state  # before its groups: see rule 5 of inprocess.communication
        dist.destroy_process_group()

    return body


def facts(shelf: Shelf, world: int) -> dict:
    """Hash what all ranks hold of the last step."""
    found = {}
    for rank in range(world):
        newest = max((s for s in shelf.sealed() if s.rank == rank), key=lambda s: s.step)
        header = shelf.header(rank, newest.buffer)
        assert isinstance(header, Header)
        with mmap.mmap(shelf.fd(rank, newest.buffer), 0) as whole:
            meta = whole[header.meta_offset : header.meta_offset + header.meta_bytes]
            hashed = hashlib.sha256(meta)
            for leaf in Layout.from_json(meta).leaves():  # between leaves lies what an earlier layout left there
                start = header.payload_offset + leaf.offset
                hashed.update(whole[start : start + leaf.nbytes])
            found[rank] = [newest.step, hashed.hexdigest()]
    return found


def run(kind: str, world: int, folder: str, name: str, deaths: dict[int, int]) -> dict:
    shelf = Shelf()
    agent = SmallAgent(shelf, world)
    left = dict(deaths)
    for attempt in range(len(deaths) + 1):
        dies = dict(list(left.items())[:1])
        agent.generation(train(kind, world, folder, f"{name}-{attempt}", dies))
        agent.pump(until=lambda dies=dies: any(rank not in agent.links for rank in dies))
        for rank in [r for r in agent.pids if dies and r not in dies]:
            agent.kill(rank)
        agent.pump()
        ended = agent.reap()
        assert dies or set(ended.values()) == {0}, ended
        for rank in dies:
            del left[rank]
    losses: dict = {}
    for rank, message in agent.said:
        losses.setdefault(f"{rank}:{message['step']}", []).append([message["loss"], message["batch"]])
    result = {"losses": losses, "end": facts(shelf, world), "reason": shelf.plan.reason}
    shelf.close()
    return result


if __name__ == "__main__":
    folder, found = sys.argv[1], {}
    for case in sys.argv[2:]:
        kind, world = case.split(":")
        twin = run(kind, int(world), folder, f"{case}-twin", {})
        found[case] = {"twin": twin, "faulty": run(kind, int(world), folder, f"{case}-faulty", DEATHS)}
    print(json.dumps(found))
