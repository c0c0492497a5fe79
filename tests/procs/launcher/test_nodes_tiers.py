"""All tiers of a job on two nodes: what one node took is had from its copy, what both took from the directory."""

import json
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
        time.sleep(0.05)
    note("end", weights=[float(x) for x in model.module.weight.flatten()])
train()
"""
EVERY = 8


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


def begin(start, directory, steps, spares, *more):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    shared = ["--checkpoint-dir", str(directory), "--checkpoint-interval", str(EVERY)] if directory else []
    flags = ["--nnodes", str(len(spares)), "--rdzv-endpoint", f"127.0.0.1:{port}", "--checkpoint-peer-interval", "1"]
    flags += [*shared, *more]
    own = [["--node-rank", str(node), "--spares", str(spare)] for node, spare in enumerate(spares)]
    return [start(TRAIN, *flags, *more, env={"STEPS": str(steps)}) for more in own]


def whole(directory):
    return [one.step for one in catalog.scan(str(directory)) if one.complete]


def began(job, generation):
    """Where ranks of this node began a generation, and what its agent wrote down of that."""
    notes = job.notes() if callable(job.notes) else job.notes
    steps = {note["step"] - 1 for note in notes if note["what"] == "from" and note["generation"] == generation}
    told = []
    for path in job.run_dir.rglob("agent-*.jsonl"):
        lines = [json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")]
        started = [line["is"] for line in lines if line["event"] == "GenerationStarted"]
        told += [(one["restore_step"], one["restored_from"]) for one in started if one["number"] == generation]
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
    first.wait_for("from", 3)
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
        assert began(one, 0) == ({durable}, [(durable, "disk")])


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_world_that_shrinks_onto_several_nodes_goes_on_from_memory_and_copies(start, lost):
    """No disk at all. Each node that is left has the states of all ranks, fetched where they are not there."""
    jobs = begin(start, None, 40, (0, 0, 0), "--min-world-size", "2", "--replacement-timeout", "1")
    for job in jobs:
        job.wait_for("step", 8)
    os.kill(jobs[lost].process.pid, signal.SIGKILL)
    ended = [job.ended() for job in jobs]
    before = max(note["step"] for one in ended for note in one.of("step") if note["generation"] == 0)
    for number in {0, 1, 2} - {lost}:
        one = ended[number]
        assert one.code == 0, one.err[-3000:]
        (step,), told = began(jobs[number], 1)
        assert before - step <= 2, f"step {before} was begun, and the next generation goes on after {step}"
        assert told == [(step, "peer")]
        assert one.of("end")[0]["weights"] == pytest.approx(alone(40), rel=1e-4), "a mean of three is rounded"
    assert len({tuple(note["weights"]) for one in ended for note in one.of("end")}) == 1
