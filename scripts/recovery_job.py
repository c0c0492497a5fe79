"""The job of measure_recovery.py: a small model whose gradients are all-reduced; a step takes some 20 ms."""

import sys
import time

import torch
import torch.distributed as dist

import everstep


@everstep.resilient
def train(run: everstep.Run) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 128)
    for _ in run.steps(int(sys.argv[1]), model=model, optimizer=optimizer):
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(0.02)


train()
