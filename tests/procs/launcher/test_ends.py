"""How a job ends whose work is done, or nearly: results stand, failures are told, and of what they really were."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

LAST = """
from everstep.inprocess import call
from everstep.recovery.core.member import Phase
KIND = os.environ["KIND"]
def wait_for(self, *phases, real=call.Caller._wait_for):
    if self._own.phase is Phase.COMPLETING and os.environ["RANK"] == "1" and not os.path.exists("struck"):
        open("struck", "w").close()
        if KIND == "GIL":
            ctypes.PyDLL(None).sleep(1000)
        os.kill(os.getpid(), getattr(signal, KIND))
    return real(self, *phases)
call.Caller._wait_for = wait_for
@everstep.resilient
def train(run):
    model = torch.nn.Linear(2, 2)
    for step in run.steps(3, model=model):
        dist.barrier()
        note("step", step=step)
    if run.rank == 1:
        with run.paused():
            while not os.path.exists("first has completed"):
                time.sleep(0.01)
        time.sleep(0.3)
    else:
        open("first has completed", "w").close()
    return run.rank
result = train()
note("returned", result=result)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP", "GIL"])
def test_the_last_to_complete_is_lost_over_it_and_its_successor_brings_the_job_to_its_end(start, kind):
    """All functions have returned, but nobody is let go before all are known to live."""
    ended = start(LAST, "--nproc-per-node", "2", env={"KIND": kind}).ended(100)
    assert ended.code == 0, ended.err
    (fault,) = ended.events("FaultNoticed")
    assert (fault["injured_rank"], fault["step"]) == (1, 3)
    assert sorted(n["result"] for n in ended.of("returned")) == [0, 1]
    assert [n["step"] for n in ended.of("step") if n["rank"] == 1] == [1, 2, 3], "nothing is done again"


AFTER = """
@everstep.resilient
def train(run):
    dist.barrier()
train()
if os.environ["RANK"] == "1":
    open("ends", "w").close()
    if os.environ["KIND"] == "raise":
        raise ValueError("no room for the plots")
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("ends"):
    time.sleep(0.02)
time.sleep(2.0)
note("wrote its results")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "status"), [("raise", 1), ("SIGKILL", -9)])
def test_a_rank_that_fails_after_the_end_ends_no_other(start, kind, status):
    """The failure is told, in the exit code too; what the others still write is written."""
    ended = start(AFTER, "--nproc-per-node", "3", env={"KIND": kind}).ended(100)
    assert ended.code == 1, ended.err
    assert sorted(n["rank"] for n in ended.of("wrote its results")) == [0, 2]
    (end,) = ended.events("RunEnded")
    assert end["reason"].startswith(f"rank 1 ended with status {status} after all had completed: ")
    assert "the function's results stand" in ended.err
    assert not ended.events("FaultNoticed")


FAULTY = """
from everstep.inprocess.interrupt import RankShouldRestart
@everstep.resilient
def train(run):
    model = torch.nn.Linear(2, 2)
    try:
        for step in run.steps(6, model=model):
            dist.barrier()
            note("step", step=step)
            if step == 3 and run.generation == 0:
                BODY
    finally:
        END
train()
note("returned")
"""


def faulty(body, end="pass"):
    return FAULTY.replace("BODY", body).replace("END", end)


@pytest.mark.long
def test_the_last_allowed_fault_is_named_by_who_died_and_not_by_who_lost_it(start):
    body = "os.kill(os.getpid(), signal.SIGKILL) if run.rank == 1 else dist.barrier()"
    ended = start(faulty(body), "--nproc-per-node", "3", "--max-restarts", "0").ended(100)
    assert ended.code == 1
    (end,) = ended.events("RunEnded")
    assert end["reason"].startswith("all 0 restarts that --max-restarts allows are used: death of rank 1 after step")
    (fault,) = ended.events("FaultNoticed")
    assert (fault["kind"], fault["injured_rank"]) == ("death", 1)


def test_a_second_fault_is_not_taken_for_the_cause_of_the_first(start):
    """Rank 1 is killed while it leaves for rank 0's exception, which is what the user has to read."""
    body = """if run.rank == 0:
                    raise ValueError("the batch is bad")
                dist.barrier()"""
    end = """if run.rank == 1 and isinstance(sys.exc_info()[1], RankShouldRestart):
            os.kill(os.getpid(), signal.SIGKILL)"""
    ended = start(faulty(body, end), "--nproc-per-node", "3").ended(100)
    assert ended.code == 0, ended.err
    (fault,) = ended.events("FaultNoticed")
    assert (fault["kind"], fault["injured_rank"], fault["text"]) == ("exception", 0, "ValueError: the batch is bad")
    assert len(ended.of("returned")) == 3


def test_a_function_that_takes_its_groups_down_with_a_dead_peer_is_left_and_its_process_kept(start):
    body = "os.kill(os.getpid(), signal.SIGKILL) if run.rank == 1 else dist.barrier()"
    ended = start(faulty(body, "dist.destroy_process_group()"), "--nproc-per-node", "3").ended(100)
    assert ended.code == 0, ended.err
    (_, after) = ended.events("GenerationStarted")
    first, second, third = [why for _, _, _, why in after["members"]]
    assert (first, third) == ("kept", "kept")
    assert second in ("spare", "started")  # the job may be quicker than its spare
    assert len(ended.of("returned")) == 3
