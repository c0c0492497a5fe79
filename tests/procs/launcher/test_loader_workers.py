"""E30: whoever holds a dead rank's sockets hides its end from its peers; they learn of it from the agent."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

JOB = """
from torch.utils.data import DataLoader
@everstep.resilient
def train(run):
    batches = iter(DataLoader(range(10**6), num_workers=2, multiprocessing_context="fork"))
    for step in run.steps(12):
        next(batches)
        if step == 6 and run.rank == 1 and not os.path.exists("fired"):
            open("fired", "w").close()
            workers = [int(w) for w in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
            note("fault", workers=workers)
            os.kill(os.getpid(), 9)
        if run.rank == 0 and step == 6 and not os.path.exists("waits"):
            open("waits", "w").close()
            note("waits")
            try:
                dist.all_reduce(torch.ones(1))
            finally:
                note("out")
        dist.all_reduce(torch.ones(1))
        note("step", step=step)
train()
"""


def test_a_peer_does_not_wait_for_the_dead_ranks_loader_workers(start):
    """They look for their parent every 5 s only, and hold its sockets open until then."""
    ended = start(JOB, "--nproc-per-node", "2").ended(90)
    assert ended.code == 0, ended.err
    (fault,), (waits,), (out,) = (ended.of(what) for what in ("fault", "waits", "out"))
    assert len(fault["workers"]) == 2
    noticed = ended.events("FaultNoticed")
    assert [f["kind"] for f in noticed] == ["death"], f"{noticed}\n{ended.err}"
    # The limits tell "at once" from "after the loader's 5 s", on a machine that does other things too.
    assert noticed[0]["mono_s"] - fault["at"] < 3.0
    assert out["at"] - max(fault["at"], waits["at"]) < 3.0
    assert {n["step"] for n in ended.of("step")} == set(range(1, 13))
