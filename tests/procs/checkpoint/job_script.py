"""The job of test_job.py. Usage: script STEPS SECONDS_A_STEP LOSSES_FILE"""

import os
import sys

import torch
from torch import nn

import everstep
from everstep.clock import SYSTEM

STEPS, PAUSE_S, LOSSES = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]


@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    torch.manual_seed(run.rank)
    for step in run.steps(STEPS, model=model, optimizer=optimizer, scheduler=scheduler):
        SYSTEM.sleep(PAUSE_S)
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with open(LOSSES, "a") as file:
            file.write(f"{run.rank} {step} {loss.item().hex()} {os.getpid()}\n")


train()
