"""Checkpoints of a job on several nodes: its coordinator's node dies, others go on, and so does the next job."""

import importlib.util
import os
import re
import signal
import socket
from pathlib import Path

import pytest
import torch

from everstep.checkpoint import catalog
from everstep.checkpoint.storage.fsspec_bucket import connect
from everstep.checkpoint.storage.object_claim import LEASE_S, ObjectClaim
from everstep.checkpoint.storage.owner import read_owner
from everstep.clock import SYSTEM
from everstep.errors import ConfigurationError

_spec = importlib.util.spec_from_file_location("s3_server", Path(__file__).parents[1] / "checkpoint" / "s3_server.py")
s3_server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(s3_server)

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]
TRAIN = """
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.5)
    for step in run.steps(int(os.environ["STEPS"]), model=model, optimizer=optimizer):
        model(torch.full((2, 4), float(step))).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step)
        time.sleep(0.1)
    note("end", weights=[float(x) for x in model.weight.flatten()])
train()
"""


def alone(steps):
    """What the weights come to: two equal gradients are one, doubled."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.5)
    for step in range(1, steps + 1):
        model(torch.full((2, 4), float(step))).sum().backward()
        for parameter in model.parameters():
            parameter.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
    return [float(x) for x in model.weight.detach().flatten()]


def begin(start, directory, steps, spares, environment=None):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    shared = ["--checkpoint-dir", str(directory), "--checkpoint-interval", "5"]
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *shared]
    own = [["--node-rank", str(node), "--spares", str(spare)] for node, spare in enumerate(spares)]
    return [start(TRAIN, *flags, *more, env={"STEPS": str(steps), **(environment or {})}) for more in own]


def whole(directory):
    found = catalog.scan(str(directory)) if directory.exists() else []
    return [one.step for one in found if one.complete]


def test_the_coordinator_s_node_dies_others_save_on_and_the_next_job_goes_on_from_there(start, tmp_path):
    shared = tmp_path / "shared"
    first, second = begin(start, shared, 30, (0, 1))
    deadline = SYSTEM.now() + 120
    while not whole(shared):
        assert first.process.poll() is None, first.process.communicate()
        assert SYSTEM.now() < deadline, "nothing is saved"
        SYSTEM.sleep(0.05)
    os.kill(first.process.pid, signal.SIGKILL)
    lost, other = first.ended(), second.ended()
    assert lost.code == -signal.SIGKILL
    assert other.code == 0, other.err[-3000:]
    ends = other.of("end")
    assert [note["weights"] for note in ends] == [alone(30)] * len(ends)
    assert len(ends) == 2
    assert max(whole(shared)) == 30
    for one in catalog.scan(str(shared)):
        assert not catalog.verify(one)
    again = [job.ended() for job in begin(start, shared, 34, (0, 0))]
    for one in again:
        assert one.code == 0, one.err[-3000:]
        assert {note["step"] for note in one.of("step")} == {31, 32, 33, 34}
        assert [note["weights"] for note in one.of("end")] == [alone(34)]
    assert re.search(r"continuing from \S+/step-30: 30 of 34 steps are done", again[0].err + again[0].out)
    assert max(whole(shared)) == 34


@pytest.mark.long
def test_the_claim_of_an_object_store_goes_on_with_the_next_node(start, monkeypatch):
    """The node that renews it is killed: another job is refused all the same, and saves come to their ends."""
    for package in ("s3fs", "moto", "flask_cors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} (pip install 'everstep[dev]')")
    server = s3_server.Server()
    try:
        assert server.ask("PUT", "/bucket")[0] == 200
        for key, value in (environment := s3_server.environment(server.port)).items():
            monkeypatch.setenv(key, value)
        url = "s3://bucket/claim"
        first, second = begin(start, url, 100_000, (0, 1), environment)
        bucket = connect(url)
        deadline = SYSTEM.now() + 120
        while not catalog.scan(url):
            assert first.process.poll() is None, first.process.communicate()
            assert SYSTEM.now() < deadline, "nothing is saved"
            SYSTEM.sleep(0.05)
        owner = read_owner(bucket)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.process.wait(60) == -signal.SIGKILL  # its hub goes on, and holds its pipes
        while read_owner(bucket)["pid"] == owner["pid"]:
            assert SYSTEM.now() < deadline, "nobody goes on with the claim"
            SYSTEM.sleep(0.05)
        assert read_owner(bucket)["job"] == owner["job"]
        began = SYSTEM.now()
        with pytest.raises(ConfigurationError, match="is in use by the run"):
            ObjectClaim(bucket, "bbbbbbbb").take("another job")
        assert SYSTEM.now() - began < LEASE_S, "a renewal is seen before"
        saved = catalog.scan(url)[0].step
        while catalog.scan(url)[0].step == saved:
            assert SYSTEM.now() < deadline, "no save comes to its end any more"
            SYSTEM.sleep(0.05)
        os.kill(second.process.pid, signal.SIGTERM)
        assert second.ended().code == 143
        first.ended()
    finally:
        server.end()


def test_a_local_directory_is_refused_on_several_nodes(start, tmp_path):
    flags = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:1"]
    ended = start(TRAIN, *flags, "--checkpoint-local-dir", str(tmp_path / "l"), env={"STEPS": "1"}).ended()
    assert ended.code == 64
    assert "is lost with that node" in ended.err
