"""Slow but healthy jobs at defaults, nothing declared, in real time: none is taken for hung again and again.

The same stories and thousands of others, simulated: tests/unit/launcher/test_slow_but_healthy.py.
"""

import os
import signal
import time

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(600)]

MANY = """
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i):
        if i == 320 and int(os.environ["RANK"]) == 1:
            note("stall"); time.sleep(30)
        return i
class Slow:
    \"\"\"A file on storage that takes a minute for what torch.save writes.\"\"\"
    def __init__(self): self.left = 60.0
    def write(self, data):
        if self.left > 0:
            time.sleep(min(self.left, 20.0)); self.left -= 20.0
        return len(data)
    def flush(self): pass
@everstep.resilient
def train(run):
    model = torch.nn.Linear(8, 8)
    loader = StatefulDataLoader(Data(), batch_size=1)
    for step, _ in run.steps(400, loader, model=model):
        if step == 40 and run.rank == 0:
            note("evaluates")
            until = time.monotonic() + 40
            while time.monotonic() < until:
                sum(range(1000))
        if step == 80 and run.rank == 0:
            note("saves"); torch.save(model.state_dict(), Slow())
        dist.barrier()
        note("step", step=step)
        time.sleep(0.05)
train()
"""


def freeze(pids, number):
    for pid in pids:
        os.kill(pid, number)


def test_an_evaluation_a_save_a_stall_and_a_job_that_was_stopped_raise_no_alarm(start):
    """40 s of Python on rank 0 while the other waits in a barrier; 60 s in torch.save; 30 s without a batch."""
    job = start(MANY, "--nproc-per-node", "2")
    while not any(n["step"] == 200 for n in job.wait_for("step", limit_s=400)):
        assert job.process.poll() is None, job.process.communicate()
        time.sleep(0.1)
    pids = job.left()
    freeze(pids, signal.SIGSTOP)
    time.sleep(30)
    freeze(reversed(pids), signal.SIGCONT)
    ended = job.ended(400)
    assert ended.code == 0, ended.err
    assert {n["what"] for n in ended.notes} >= {"evaluates", "saves", "stall"}
    assert ended.events("FaultNoticed") == []
    assert len({n["pid"] for n in ended.of("step")}) == 2
    assert len(ended.of("step")) == 800
    first = ended.events("LimitLearned")[0]
    assert first["idle_s"] == 5.0
    assert 0.03 < first["step_s"] < 1.0
    assert first["steps"] >= 3


CHILD = """
import subprocess
@everstep.resilient
def train(run):
    for step in run.steps(120):
        if step in (30, 80) and run.rank == 0:
            note("waits", step=step, generation=run.generation)
            subprocess.run(["sleep", "40"], check=True)
        dist.barrier()
        time.sleep(0.05)
train()
"""


def test_a_wait_for_a_child_raises_one_alarm_and_then_its_place_has_the_time(start):
    ended = start(CHILD, "--nproc-per-node", "2").ended(400)
    assert ended.code == 0, ended.err
    assert [(f["kind"], f["injured_rank"], f["step"]) for f in ended.events("FaultNoticed")] == [("stall", 0, 29)]
    assert [(n["step"], n["generation"]) for n in ended.of("waits")] == [(30, 0), (30, 1), (80, 1)]
    told = [e for e in ended.events("LimitLearned") if "script.py:" in e["place"]]
    assert "is raised from 5 s to 50 s" in told[0]["text"]
    assert told[0]["place_s"] == 50.0
    assert "has ended by itself" in told[1]["text"]
    assert told[1]["place_s"] > 79


COMPILE = """
import subprocess
slow = []
def backend(module, inputs):
    if slow:
        note("compiles")
        until = time.monotonic() + 25
        while time.monotonic() < until:
            sum(range(1000))
        subprocess.run(["sleep", "35"], check=True)
    return module.forward
@torch.compile(backend=backend, dynamic=False)
def loss_of(x):
    return (x * 2).sum()
@everstep.resilient
def train(run):
    for step in run.steps(760):
        slow[:] = [step] if run.rank == 1 and step in (700, 740) else []
        if step == 1 and run.generation == 0:
            note("first"); time.sleep(60)
        loss_of(torch.ones(4 + (step >= 700) + (step >= 740)))
        if step == 720 and run.rank == 0 and run.generation == 0:
            raise RuntimeError("a fault of another kind")
        dist.barrier()
        note("step", step=step)
train()
"""


def test_a_first_step_of_a_minute_and_a_rank_that_compiles_anew_raise_no_alarm(start):
    ended = start(COMPILE, "--nproc-per-node", "2").ended(560)
    assert ended.code == 0, ended.err
    assert [(f["kind"], f["injured_rank"]) for f in ended.events("FaultNoticed")] == [("exception", 0)]
    assert len(ended.of("compiles")) == 2
    assert len({n["pid"] for n in ended.of("step")}) == 2
