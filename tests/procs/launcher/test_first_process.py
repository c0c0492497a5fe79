"""The agent as the first process of a container: signals reach it from its first moments on, and it buries the dead."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
TRAIN = """
def states():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with open(f"/proc/{name}/stat") as file: found.append(file.read().rpartition(")")[2].split()[0])
    return found
@everstep.resilient
def train(run):
    weight = torch.nn.Linear(2, 2)
    for _ in range(100):
        child = os.fork()
        if not child:
            os.fork() and os._exit(0)
            time.sleep(0.02)
            os._exit(0)
        os.waitpid(child, 0)
    for step in run.steps(100000, weight=weight):
        dist.all_reduce(torch.ones(1))
        if step == 30: note("counted", dead=states().count("Z"), parent=os.getppid())
        note("step", step=step)
        time.sleep(0.02)
train()
"""


@pytest.fixture
def alone(start):
    """A job whose agent is process 1; and that process's number here."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("needs leave for namespaces (root), and unshare (Debian: util-linux)")

    def begin(*flags):
        return start(TRAIN, *flags, prefix=UNSHARE)

    return begin


def first_of(job):
    """The first process of the job's namespace, as it is numbered here."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = children.read_text().split()
        if found and "python" in Path(f"/proc/{found[0]}/cmdline").read_text():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("no agent")


def caught(pid, number):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("SigCgt"))


def test_a_signal_to_process_1_saves_and_ends_the_job_and_no_dead_process_is_left(alone, tmp_path):
    job = alone("--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "ckpt"))
    for note in job.wait_for("counted", 2):
        assert (note["dead"], note["parent"]) == (0, 1), "two hundred orphans have died"
    os.kill(first_of(job), signal.SIGTERM)
    ended = job.ended(60)
    assert ended.code == 143, ended.err
    last = max(note["step"] for note in ended.of("step"))
    assert f"after step {last}. The checkpoint of step {last} is durable" in ended.err


@pytest.mark.long
def test_a_signal_before_any_rank_begins_is_heard_too(alone):
    """Process 1 gets no signal that it has no handler for: it must have one while torch is being imported."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        job = alone()
        first = first_of(job)
        while not caught(first, number):
            time.sleep(0.01)
        os.kill(first, number)
        ended = job.ended(60)
        assert ended.code == 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)
        assert not ended.of("step")
