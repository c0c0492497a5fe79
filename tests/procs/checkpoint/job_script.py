"""The job of test_job.py. Usage: script STEPS SECONDS_A_STEP LOSSES_FILE"""

import os
import random
import signal
import sys

import numpy as np
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

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
    np.random.seed(run.rank)
    random.seed(run.rank)
    rows = torch.arange(100 * 16, dtype=torch.float32).reshape(100, 16) / 1600
    loader = StatefulDataLoader(rows, batch_size=8, shuffle=True, drop_last=True)  # 12 batches an epoch
    if os.environ.get("STOP_BEFORE_RESTORE"):
        os.kill(int(os.environ["STOP_BEFORE_RESTORE"]), signal.SIGSTOP)
    for step, batch in run.steps(STEPS, loader, model=model, optimizer=optimizer, scheduler=scheduler):
        SYSTEM.sleep(PAUSE_S)
        noise = torch.randn(8, 16) + random.random() + np.random.rand()
        loss = model(batch + noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with open(LOSSES, "a") as file:
            file.write(f"{run.rank} {step} {loss.item().hex()} {os.getpid()}\n")


train()
