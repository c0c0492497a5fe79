"""All tiers of a job on two nodes: what one node took is had from its copy, what both took from the directory."""

import os
import signal
import socket

import pytest
import torch

from everstep.checkpoint import catalog

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]
TRAIN = """
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.5)
    first = True
    for step in run.steps(int(os.environ["STEPS"]), model=model, optimizer=optimizer):
        if first: note("from", generation=run.generation, step=step)
        first = False
        model(torch.full((2, 64), float(step) / 100)).sum().backward()
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step, generation=run.generation)
        time.sleep(0.1)
    note("end", weights=[float(x) for x in model.module.weight.flatten()])
train()
"""
EVERY = 10


def alone(steps):
    """What the weights come to: the mean of two equal gradients is either."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.5)
    for step in range(1, steps + 1):
        model(torch.full((2, 64), float(step) / 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(x) for x in model.weight.detach().flatten()]


def begin(start, directory, steps, spares):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    shared = ["--checkpoint-dir", str(directory), "--checkpoint-interval", str(EVERY)]
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *shared, "--checkpoint-peer-interval", "1"]
    own = [["--node-rank", str(node), "--spares", str(spare)] for node, spare in enumerate(spares)]
    return [start(TRAIN, *flags, *more, env={"STEPS": str(steps)}) for more in own]


def whole(directory):
    return [one.step for one in catalog.scan(str(directory)) if one.complete]


def began(job, generation):
    """Where ranks of this node began a generation, and what its agent wrote down of that."""
    steps = {note["step"] - 1 for note in job.notes() if note["what"] == "from" and note["generation"] == generation}
    told = [(e["restore_step"], e["restored_from"]) for e in job.events()
            if e["event"] == "GenerationStarted" and e["number"] == generation]  # fmt: skip
    return steps, told


def test_a_lost_node_s_state_is_had_from_its_copy_and_that_of_all_from_the_directory(start, tmp_path):
    shared = tmp_path / "shared"
    jobs = first, second = begin(start, shared, 1000, (1, 0))
    for job in jobs:
        job.wait_for("step", EVERY + 5)
    sent = [e["bytes"] for e in first.events() if e["event"] == "TierEvent" and e["tier"] == "peer" and e["bytes"]]
    state = 2 * 2 * 4 * 256 * 65
    assert sent, "no copy counts"
    assert max(sent) < state / 4, "what both have is not sent: weights and momenta"
    durable = max(whole(shared))
    os.kill(second.process.pid, signal.SIGKILL)
    first.wait_for("step", 2 * (EVERY + 5))
    (step,), told = began(first, 1)
    assert step > durable, "the copies are newer"
    assert told == [(step, "peer")], "one rank begins from its own memory, the other from its copy"
    os.kill(first.process.pid, signal.SIGKILL)
    for job in jobs:
        assert job.ended().code == -signal.SIGKILL
    durable = max(whole(shared))
    again = [job.ended() for job in begin(start, shared, durable + 3, (0, 0))]
    for one in again:
        assert one.code == 0, one.err[-3000:]
        assert [note["step"] for note in one.of("step")] == [durable + 1, durable + 2, durable + 3]
        assert [note["weights"] for note in one.of("end")] == [alone(durable + 3)]
        (begun,) = one.events("GenerationStarted") or one.events("GenerationStarted", "node-1")
        assert (begun["restore_step"], begun["restored_from"]) == (durable, "disk")
