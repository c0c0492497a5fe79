"""A child that the wrapped function has forked is not the rank: what it raises and how it ends is its own."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

JOB = """
import threading
from everstep.inprocess import Wrapper
def fork(step):
    child = os.fork()
    if child == 0:
        HARM
    note("child", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
NATIVE = (
    JOB
    + """
@everstep.resilient
def train(run):
    for step in run.steps(6):
        if step == 3 and run.rank == 1:
            fork(step)
        dist.barrier()
    note("trained", generation=run.generation)
train()
note("returned")
"""
)
WRAPPED = (
    JOB
    + """
@Wrapper()
def train():
    dist.init_process_group("gloo")
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            fork(step)
        dist.barrier()
    note("trained", generation=0)
train()
note("returned")
"""
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("surface", [NATIVE, WRAPPED], ids=["native", "wrapper"])
@pytest.mark.parametrize(
    ("harm", "status"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("raise ValueError('of the child')", 1), ("return", 0)]
)
def test_a_child_ends_alone(start, surface, harm, status):
    if harm == "return":  # it leaves the function as its parent would: past the barrier it has no peers to meet
        surface = surface.replace(
            "            fork(step)\n", "            fork(step)\n            if os.getpid() != pid: return\n"
        )
        surface = surface.replace("def fork(step):", "pid = os.getpid()\ndef fork(step):")
    ended = start(surface.replace("HARM", harm), "--nproc-per-node", "2").ended(90)
    assert ended.code == 0, ended.err
    children = [n["status"] for n in ended.of("child")]
    assert children == [status]
    assert sorted(n["rank"] for n in ended.of("trained")) == [0, 1]
    assert {n["generation"] for n in ended.of("trained")} == {0}
    assert sorted(n["rank"] for n in ended.of("returned")) == [0, 1]
    assert ended.events("FaultNoticed") == []
    assert ("of the child" in ended.err) == ("raise" in harm)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ("ra.ShiftRanks()", "neither active nor in reserve"),
        (
            "Compose(ra.ActivateAllRanks(), ra.ShiftRanks(), ra.FilterCountGroupedByKey('node', lambda n: n > 2))",
            "no rank is left that would run the function",
        ),
        ("ra.Tree([ra.Layer(min_ranks=3, key_or_fn='job')])", "no rank is left that would run the function"),
        ("Compose(ra.ActiveWorldSizeDivisibleBy(4), ra.ShiftRanks())", "has left no rank active of 2"),
    ],
)
def test_a_job_that_no_rank_would_work_on_does_not_end_well(start, chain, words):
    text = """
from everstep.inprocess import Compose, Wrapper, rank_assignment as ra
@Wrapper(rank_assignment=CHAIN)
def train():
    note("entered")
train()
"""
    ended = start(text.replace("CHAIN", chain), "--nproc-per-node", "2").ended(90)
    assert ended.code == 1, ended.err
    assert words in ended.err
    assert ended.of("entered") == []
