"""Whom a signal to a job reaches: the ranks, once each, and never a loader's worker (LA-05)."""

import os
import pty
import signal

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = """
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 100000
    def __getitem__(self, at): return torch.tensor(float(at))
asked = []
def end(number, frame):
    asked.append(number)
    note("asked", number=number)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, end)
if __name__ == "__main__":
    dist.init_process_group("gloo")
    loader = DataLoader(Rows(), num_workers=2, multiprocessing_context=os.environ["METHOD"])
    for step, row in enumerate(loader):
        flag = torch.tensor(len(asked))
        dist.all_reduce(flag)
        if flag: break
        if step == 20: note("trains")
        time.sleep(0.01)
    note("saved", step=step, times=len(asked))
    del loader
    dist.destroy_process_group()
"""


def to_agent(job, terminal):
    os.kill(job.process.pid, signal.SIGTERM)


def to_group(job, terminal):
    os.killpg(job.process.pid, signal.SIGTERM)


def ctrl_c(job, terminal):
    os.write(terminal, b"\x03")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("way", "code"), [(to_agent, 143), (to_group, 143), (ctrl_c, 130)])
def test_each_rank_ends_its_step_with_its_loader_whole(start, way, code, method):
    ours, theirs = pty.openpty()
    try:
        # a session of its own whose terminal this is: what is typed there is a signal to its first group
        prefix = ("setsid", "--ctty", "--wait") if way is ctrl_c else ()
        streams = {"stdin": theirs} if way is ctrl_c else None
        flags = ("--nproc-per-node", "2", "--grace", "30")
        job = start(SCRIPT, *flags, wrapped=False, env={"METHOD": method}, streams=streams, prefix=prefix)
        job.wait_for("trains", 2)
        way(job, ours)
        ended = job.ended()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ended.code == code, ended.err
    assert sorted((n["rank"], n["times"]) for n in ended.of("saved")) == [(0, 1), (1, 1)], ended.err
    assert len({n["step"] for n in ended.of("saved")}) == 1
    assert len(ended.of("asked")) == 2  # nobody but the ranks has heard it
    assert "DataLoader worker" not in ended.err
