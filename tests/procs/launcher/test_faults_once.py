"""FI-01 in whole jobs: a planned fault comes once, whatever was rolled back or restarted meanwhile."""

import json

import pytest

from everstep.clock import SYSTEM

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]

JOB = """
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(20, model=model, optimizer=optimizer):
        total = model(torch.ones(2, 4)).sum()
        total.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        note("step", step=step, generation=run.generation)
        if step >= 9 and not os.path.exists("go"):
            note("stands")
            while not os.path.exists("go"):
                time.sleep(0.02)
train()
"""
PLAN = {"faults": [
    {"step": 6, "rank": 1, "type": "exception", "position": "backward"},
    {"step": 8, "rank": 0, "type": "sigkill", "position": "forward"},
    {"step": 15, "rank": 1, "type": "sigkill", "position": "boundary"},
]}  # fmt: skip


def test_once_over_a_rollback_a_replacement_and_a_restart_of_the_whole_job(start, tmp_path):
    """The first life has two of three faults and is killed at step 9; the second begins at 5, and passes 6 and 8."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    flags = ["--nproc-per-node", "2", "--checkpoint-interval", "5", "--checkpoint-dir", str(tmp_path / "ckpt")]
    flags += ["--run-dir", str(tmp_path / "run"), "--fault-plan", str(tmp_path / "plan.json")]
    first = start(JOB, *flags)
    first.wait_for("stands", 2)
    deadline = SYSTEM.now() + 30
    while not (tmp_path / "ckpt" / "step-5" / "manifest.json").exists():
        assert SYSTEM.now() < deadline, "no checkpoint of step 5"
        SYSTEM.sleep(0.02)
    first.process.kill()
    first.process.communicate()
    first.gone_within(5.0)
    told = json.loads((tmp_path / "run" / "faults.json").read_text())
    assert sorted(told["fired"]) == ["0", "1"]
    second = start(JOB, *flags)
    (second.folder / "go").touch()
    ended = second.ended()
    assert ended.code == 0, ended.err
    done = [n["step"] for n in ended.of("step") if n["rank"] == 0]
    assert done[0] == 6, "the newest checkpoint is of step 5"
    assert sorted({n["step"] for n in ended.of("step")}) == list(range(6, 21))
    assert len({n["generation"] for n in ended.of("step")}) == 2, "one fault in this life: the third"
    told = json.loads((tmp_path / "run" / "faults.json").read_text())
    assert sorted(told["fired"]) == ["0", "1", "2"]
