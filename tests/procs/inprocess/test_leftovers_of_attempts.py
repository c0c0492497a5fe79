"""What an attempt may leave behind in a job, in many attempts: aborts that do not come back, loaders' workers."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(280)]

HEAD = """
import threading
from everstep.inprocess import CallWrapper, Wrapper
def meet():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
"""

BLOCKED = """
from everstep.inprocess import nccl
def blocks(name):
    note("abort", name=name)
    time.sleep(60)
@Wrapper()
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    note("enter", iteration=call.iteration)
    nccl.aborts = lambda: {}
    meet()
    if call.iteration < 2 and rank == 0:  # as if two of its groups were NCCL's, the first of which waits for the second
        nccl.aborts = lambda: {name: (lambda name=name: blocks(name)) for name in ("group 0", "group 1")}
    dist.barrier()
    if call.iteration < 2 and rank == 1: raise ValueError("boom")
    dist.barrier()
    note("returned", iteration=call.iteration)
train()
"""


def test_aborts_that_wait_for_one_another_are_all_called_and_then_given_up(start):
    """IR-05: two groups whose aborts do not come back within a minute. The next generation does not wait for them; the
    one after it does, with a deadline, and replaces the process that they are stuck in.
    """
    ended = start(HEAD + BLOCKED, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    assert [n["iteration"] for n in ended.of("returned")] == [2, 2]
    first, second = sorted(ended.of("abort"), key=lambda n: n["at"])[:2]
    assert {first["name"], second["name"]} == {"group 0", "group 1"}
    assert second["at"] - first["at"] < 30, "the second is not called after the first has come back"
    pids = {(n["iteration"], n["rank"]): n["pid"] for n in ended.of("enter")}
    assert pids[0, 0] == pids[1, 0] != pids[2, 0]
    assert pids[0, 1] == pids[2, 1]
    assert "abort" in ended.err, "who is replaced is told with what was stuck"


LOADERS = """
import psutil
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        if i == 3: time.sleep(60)  # one worker is in a read that takes a minute
        return torch.full((100,), float(i))
def own():
    me = psutil.Process()
    return {
        "mine": [c.pid for c in me.children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE],
        "fds": me.num_fds(), "threads": threading.active_count(), "mib": me.memory_info().rss / 2**20,
    }
import subprocess
older = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
@Wrapper()
def train(call: CallWrapper):
    meet()
    note("enter", iteration=call.iteration, older=older.poll(), **own())
    if call.iteration < MANY:
        loader = torch.utils.data.DataLoader(Slow(), num_workers=4, persistent_workers=True, batch_size=1)
        for number, _ in enumerate(loader):
            dist.barrier()
            call.ping()
            if number == 2:
                raise ValueError(f"boom {call.iteration}")
try:
    train()
finally:
    older.kill(); older.wait()
"""


@pytest.mark.parametrize("many", [6, pytest.param(20, marks=pytest.mark.long)])
def test_workers_of_loaders_do_not_pile_up_over_attempts(start, many):
    """IR-11: four persistent workers, one in a read that takes a minute, in an attempt that raises between batches."""
    text = (HEAD + LOADERS).replace("MANY", str(many)).replace("@Wrapper()", "@Wrapper(initialize=TRIES)")
    tries = f"from everstep.inprocess.initialize import RetryController\nTRIES = RetryController({many + 1})\n"
    ended = start(tries + text, "--nproc-per-node", "2").ended(270)
    assert ended.code == 0, ended.err
    for rank in range(2):
        seen = {n["iteration"]: n for n in ended.of("enter") if n["rank"] == rank}
        assert sorted(seen) == list(range(many + 1))
        assert len({n["pid"] for n in seen.values()}) == 1, ended.err
        assert {n["older"] for n in seen.values()} == {None}, "what the script had started before lives on"
        second, last = seen[2], seen[many]
        assert {len(n["mine"]) for n in seen.values()} == {1}
        assert last["threads"] == second["threads"]
        # Connections come and go while it looks; what is left behind would be one and more for each attempt.
        assert last["fds"] - second["fds"] < many - 2
        assert last["mib"] - second["mib"] < 20
