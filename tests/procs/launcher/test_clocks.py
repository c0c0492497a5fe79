"""A time of day that jumps under a whole job, that differs from node to node, or that lies in the past at a restart.

A preloaded library (`time_of_day.c`) gives each process the time of day that a file says, and leaves the monotonic
clock alone, as a kernel does when an operator or NTP sets the time.
"""

import itertools
import re
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from everstep.checkpoint import catalog
from everstep.clock import SYSTEM
from everstep.goodput.report import load

COMPILER = shutil.which("cc")
pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(240),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
]
HOUR = 3600
TRAIN = """
import struct
JUMPS = {8: 3600, 16: -3600, 24: 7200}
def jump(seconds):
    with open(os.environ["TIME_OF_DAY"], "r+b") as file:
        file.write(struct.pack("=q", seconds))
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.5)
    steps = int(os.environ["STEPS"])
    for step in run.steps(steps, model=model, optimizer=optimizer):
        model(torch.full((2, 4), float(step))).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step, day=time.time())
        if run.rank == 0 and step in JUMPS and "JUMPS" in os.environ:
            jump(JUMPS[step])
        if run.rank == 1 and step in FAULTS and not os.path.exists(f"fired-{step}"):
            open(f"fired-{step}", "w").close()
            FAULTS[step]()
        time.sleep(0.02)
    note("end", weights=[float(x) for x in model.weight.flatten()])
FAULTS = {12: lambda: os.kill(os.getpid(), signal.SIGKILL), 20: lambda: 1 / 0}
train()
"""


def alone(steps):
    """What the weights of two ranks come to: two equal gradients are one, doubled."""
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


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("library") / "time_of_day.so"
    source = Path(__file__).with_name("time_of_day.c")
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made


@pytest.fixture
def clock(library, tmp_path):
    """Environment of processes whose time of day is off by what was written last into the file of that name."""

    def environment(name, seconds=0):
        file = tmp_path / name
        file.write_bytes(struct.pack("=q", seconds))
        return {"LD_PRELOAD": str(library), "TIME_OF_DAY": str(file)}

    return environment


def check_ledger(run_dir, took_s, sessions=1):
    """It adds up: no error, every second of every rank somewhere, none below nothing, no more than have passed."""
    ledger, log = load(run_dir)
    assert ledger.errors == []
    assert log.torn == 0
    assert len(ledger.story.sessions) == sessions
    assert 0 < ledger.figures.wall_s <= took_s
    for rank in ledger.ranks:
        assert min(rank.seconds.values()) >= 0
        assert sum(rank.seconds.values()) == pytest.approx(rank.wall_s, abs=1e-6)
        assert rank.unplaced_s == 0
    for one in ledger.recoveries:  # of a rank of another node it is not known how long
        assert one.recovery_s is None or 0 <= one.recovery_s < 60
    return ledger


def whole(directory):
    found = catalog.scan(str(directory))
    assert not [wound for one in found for wound in catalog.verify(one)]
    return [one.step for one in found if one.complete]


def test_a_time_of_day_that_jumps_an_hour_forth_and_back_and_a_restart_in_the_past(start, clock, tmp_path):
    """Two faults meanwhile; then the job goes on in the same folders, two hours before it ended."""
    began = SYSTEM.now()
    directory = tmp_path / "ckpt"
    saves = ["--checkpoint-dir", str(directory), "--checkpoint-interval", "4", "--checkpoint-keep", "3"]
    first = start(TRAIN, "--nproc-per-node", "2", *saves, env=clock("clock") | {"STEPS": "30", "JUMPS": "1"})
    ended = first.ended(90)
    assert ended.code == 0, ended.err
    days = [note["day"] for note in ended.of("step") if note["rank"] == 0]
    jumps = [round((b - a) / HOUR) for a, b in itertools.pairwise(days) if abs(b - a) > HOUR / 2]
    assert jumps == [1, -2, 3], "the clock did jump"
    assert [note["weights"] for note in ended.of("end")] == [alone(30)] * 2
    assert [(fault["kind"], fault["injured_rank"]) for fault in ended.events("FaultNoticed")] == [
        ("death", 1), ("exception", 1),
    ]  # fmt: skip
    assert [one for one in ended.events("TierEvent") if one["what"] == "failed"] == []
    kept = whole(directory)
    assert kept[0] == 30, "the newest is the newest step, whatever the time of day"
    assert len(kept) == 3
    check_ledger(ended.run_dir, SYSTEM.now() - began)
    again = start(TRAIN, "--nproc-per-node", "2", *saves, again=first, env=clock("clock", -2 * HOUR) | {"STEPS": "36"})
    ended = again.ended(90)
    assert ended.code == 0, ended.err
    assert re.search(r"continuing from \S+/step-30: 30 of 36 steps are done", ended.err + ended.out)
    ends = [note["weights"] for note in ended.of("end")]
    assert ends == [alone(30)] * 2 + [alone(36)] * 2
    kept = whole(directory)
    assert kept[0] == 36
    assert len(kept) == 3
    assert min(kept) > 20
    check_ledger(ended.run_dir, SYSTEM.now() - began, sessions=2)


@pytest.mark.long
def test_a_node_whose_clock_is_an_hour_ahead_saves_loses_and_goes_on_as_any_other(start, clock, tmp_path):
    """Two nodes; the one ahead loses its rank twice. The ledger of each adds up."""
    began = SYSTEM.now()
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    directory = tmp_path / "ckpt"
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--checkpoint-dir", str(directory)]
    flags += ["--checkpoint-interval", "4"]
    jobs = [
        start(
            TRAIN, *flags, "--node-rank", str(node), "--spares", str(node),
            env=clock(f"clock{node}", node * HOUR) | {"STEPS": "24"},
        )
        for node in (0, 1)
    ]  # fmt: skip
    ended = [job.ended(90) for job in jobs]
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert [note["weights"] for one in ended for note in one.of("end")] == [alone(24)] * 2
    days = [[note["day"] for note in one.of("step") if note["step"] == 24] for one in ended]
    assert round((days[1][0] - days[0][0]) / HOUR) == 1, "they did live an hour apart"
    assert whole(directory)[0] == 24
    folders = [file.parent.parent for one in ended for file in one.run_dir.rglob("events/agent-*.jsonl")]
    assert len(folders) == 2
    for folder in folders:
        ledger = check_ledger(folder, SYSTEM.now() - began)
        assert {recovery.rank for recovery in ledger.recoveries} == {1}
