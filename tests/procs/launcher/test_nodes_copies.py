"""A node that goes costs no more than what its copies on other nodes had not: two agents on loopback, a real job."""

import json
import os
import signal

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

TRAIN = """
@everstep.resilient
def train(run):
    note("enter", generation=run.generation)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(100 + run.rank)
    first = True
    for step in run.steps(int(os.environ["STEPS"]), model=model, optimizer=optimizer):
        if first: note("from", generation=run.generation, step=step)
        first = False
        loss = model(torch.randn(2, 4)).square().sum()
        loss.backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step, generation=run.generation, loss=loss.item().hex())
        time.sleep(float(os.environ.get("PACE", "0")))
train()
"""


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def begin(start, *flags, nodes=2, **env):
    base = ("--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{free_port()}", *flags)
    return [start(TRAIN, *base, "--node-rank", str(number), env=env) for number in range(nodes)]


def losses(jobs):
    """The last word on each rank's step."""
    found = {}
    for job in jobs:
        for note in job.of("step"):
            found[note["rank"], note["step"]] = max(found.get((note["rank"], note["step"]), (-1, "")),
                                                   (note["generation"], note["loss"]))  # fmt: skip
    return {at: loss for at, (_, loss) in found.items()}


def told(job, kind):
    """Events of all processes of a node."""
    found = []
    for path in sorted(job.run_dir.rglob("*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["event"] == kind:
                found.append(line["is"])
    return found


@pytest.mark.long
@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_node_costs_a_step_at_most_and_the_curve_goes_on_to_the_bit(start, lost):
    twin = [job.ended() for job in begin(start, STEPS="25")]
    assert [one.code for one in twin] == [0, 0], twin[0].err[-3000:]
    jobs = begin(start, "--spares", "1", STEPS="25", PACE="0.15")
    for job in jobs:
        job.wait_for("step", 8)
    os.kill(jobs[lost].process.pid, signal.SIGKILL)
    ended = [job.ended() for job in jobs]
    left = ended[1 - lost]
    assert left.code == 0, left.err[-3000:]
    before = max(note["step"] for job in jobs for note in job.notes() if note["what"] == "step"
                 and note["generation"] == 0)  # fmt: skip
    again = [note["step"] for note in left.of("from") if note["generation"] > 0]
    assert len(set(again)) == 1
    assert before - (again[0] - 1) <= 2, f"step {before} was begun, and the next generation began with {again[0]}"
    assert losses(ended) == losses(twin)
    restored = [event for event in told(left, "Restored") if event["tier"] == "peer"]
    assert len(restored) == 1
    assert f"from the copy that node node-{1 - lost} keeps" in restored[0]["why"]
    assert "s old" in restored[0]["why"]
