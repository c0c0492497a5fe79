"""A rank that would run and is given no processor: it is interrupted where its limit is over, and keeps its process."""

import contextlib
import time
import uuid
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(180)]
TRAIN = """
@everstep.resilient
def train(run):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in run.steps(200, model=model, optimizer=optimizer):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step)
        for turn in range(20):
            time.sleep(0.001)
train()
"""


@pytest.fixture
def group():
    """A control group that has a thousandth of a processor."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            made = Path("/sys/fs/cgroup/cpu", path.lstrip("/"), f"everstep-test-{uuid.uuid4().hex[:8]}")
            with contextlib.suppress(OSError):
                made.mkdir()
                (made / "cpu.cfs_period_us").write_text("1000000")
                (made / "cpu.cfs_quota_us").write_text("1000")
                yield made
                for pid in (made / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError, OSError):
                        (made.parent / "cgroup.procs").write_text(pid)
                made.rmdir()
                return
    pytest.skip("no control group can be made here")


def test_a_starved_rank_is_not_taken_for_one_that_holds_its_lock(start, group):
    job = start(TRAIN, "--nproc-per-node", "2", "--soft-timeout", "1")
    job.wait_for("step", 10)
    victim = next(note["pid"] for note in job.wait_for("step", 10) if note["rank"] == 1)
    (group / "cgroup.procs").write_text(str(victim))
    time.sleep(5)  # long enough for a verdict: the limit, and the patience with whoever does not answer
    with contextlib.suppress(ProcessLookupError):  # it was killed
        (group.parent / "cgroup.procs").write_text(str(victim))
    ended = job.ended(120)
    assert ended.code == 0, ended.err
    assert "wedged" not in {fault["kind"] for fault in ended.events("FaultNoticed")}, ended.err
    assert len({note["pid"] for note in ended.of("step")}) == 2
