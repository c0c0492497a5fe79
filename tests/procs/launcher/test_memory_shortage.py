"""CS-13 through the command line: snapshots that do not fit are refused before the first step, with what to change."""

import pytest

pytestmark = pytest.mark.procs

JOB = """
@everstep.resilient
def train(run):
    note("enter")
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in run.steps(3, model=model, optimizer=optimizer):
        note("step", step=step)
train()
"""


def test_memory_too_small_for_the_snapshots_is_told_and_not_tried_again(start):
    ended = start(JOB, "--nproc-per-node", "2", "--snapshot-memory", "20MB").ended()
    assert ended.code == 78, ended.err
    assert not ended.of("step")
    assert len(ended.of("enter")) == 2
    assert "buffers of" in ended.err
    assert "--snapshot-memory leaves" in ended.err
    assert "Raise --snapshot-memory" in ended.err
