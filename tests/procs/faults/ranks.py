"""Two ranks train with hooks; started once, so that torch is imported once, it forks them anew for each case.

argv: a log folder, then one JSON object a case: {"name", "wrap", "links": [fd, fd], "rows"}.
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # an optimizer imports it at its first use: here once for all cases
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from everstep.faults.calls import Calls
from everstep.faults.hooks import arm
from everstep.faults.injectors import InjectedFault
from everstep.recovery.link import Link, LinkClosed

STEPS = 12


def reader(link, calls):
    """The worker's waiting thread: the one that receives."""
    try:
        while True:
            message, _ = link.receive()
            calls.deliver(message)
    except LinkClosed:
        return


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = torch.nn.Linear(8, 32)
        self.drop = torch.nn.Dropout(0.3)
        self.sink = torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.sink(self.drop(torch.nn.functional.gelu(self.lift(x))))


def build(wrap):
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    if wrap == "fsdp2":
        for block in model:
            fully_shard(block)
        fully_shard(model)
    elif wrap == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(rank, case, log):
    link = Link.from_fd(case["links"][rank])
    calls = Calls(link.send)
    thread = threading.Thread(target=reader, args=(link, calls))
    thread.start()
    model, optimizer = build(case["wrap"])
    hooks = arm(case["told"], calls.call, rank, STEPS, lambda event: log("event", type(event).__name__))
    if hooks is not None:
        hooks.attach([model], [optimizer])
    torch.manual_seed(100 + rank)
    stepped = optimizer.register_step_post_hook(lambda *_: log("stepped", step))
    step = 0
    try:
        for step in range(1, STEPS + 1):
            log("random", step, torch.get_rng_state().sum().item(), threading.active_count())
            if hooks is not None:
                hooks.at_boundary(step)
            log("began", step)
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            log("forward", step)
            loss.backward()
            log("backward", step)
            optimizer.step()
            log("loss", step, loss.item().hex())
        log("finished")
    except InjectedFault as error:
        log("raised", step, str(error))
    except RuntimeError as error:  # the peer is gone
        log("alone", step, type(error).__name__)
    if hooks is not None:
        hooks.detach()
    stepped.remove()
    log("standing", sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules() if not case["wrap"]))
    link.shutdown()
    thread.join()
    log("threads", threading.active_count())


def main():
    folder = Path(sys.argv[1])
    for text in sys.argv[2:]:
        case = json.loads(text)
        pids = []
        for rank in range(len(case["links"])):
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
            fd = os.open(folder / case["name"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

            def log(what, *values, rank=rank, fd=fd):
                os.write(fd, (json.dumps([time.monotonic(), rank, what, *values]) + "\n").encode())

            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/{case['name']}.store", rank=rank, world_size=len(case["links"])
            )
            train(rank, case, log)
            os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
        for fd in case["links"]:  # the agent's end learns that this case is over
            socket.socket(fileno=fd).close()


if __name__ == "__main__":
    main()
