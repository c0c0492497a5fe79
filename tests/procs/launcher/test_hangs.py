"""When silence is a hang, in whole jobs: what is declared is none; what never leaves is replaced."""

import pytest

pytestmark = pytest.mark.procs

PHASES = """
def once(name):
    if run_rank == 1 and not os.path.exists(name):
        open(name, "w").close()
        note("hang", name=name)
        return True
    return False
@everstep.resilient
def train(run):
    global run_rank
    run_rank = run.rank
    note("enter", generation=run.generation)
    for step in run.steps(20):
        if step == 1:
            time.sleep(FIRST)
        if step == 8 and run.rank == 0:
            with run.phase("checkpoint"):
                time.sleep(PHASE)
        if step == 10 and run.rank == 1:
            with run.phase("outer", limit=60):
                with run.phase("eval", limit=60):
                    time.sleep(PHASE)
        if step == 12:
            time.sleep(STALL)
        UNDECLARED
        dist.barrier()
        note("step", step=step)
        time.sleep(0.02)
    time.sleep(PHASE)
train()
"""


def text(first, phase, stall, undeclared="pass"):
    replaced = {"FIRST": first, "PHASE": phase, "STALL": stall, "UNDECLARED": undeclared}
    found = PHASES
    for name, value in replaced.items():
        found = found.replace(name, str(value))
    return found


def test_what_is_declared_is_no_hang_and_the_same_undeclared_is(start):
    """HD-01, scaled down: first step 2.5 s, phases and tail 1.6 s, a stall of 0.5 s, under a limit of 1 s."""
    ended = start(text(2.5, 1.6, 0.5), "--nproc-per-node", "2", "--soft-timeout", "1").ended()
    assert ended.code == 0, ended.err
    assert ended.events("FaultNoticed") == []
    assert len({n["pid"] for n in ended.of("step")}) == 2

    undeclared = (
        "if step == 4 and once('slow'): time.sleep(3)\n"
        "        if step == 8 and once('left'):\n"
        "            with run.phase('eval', limit=1): time.sleep(3)\n"
        "        if run.generation == 2 and once('first'): time.sleep(1000)"
    )
    job = start(text(0, 0.2, 0.2, undeclared), "--nproc-per-node", "2", "--soft-timeout", "1", "--first-timeout", "2")
    ended = job.ended()
    assert ended.code == 0, ended.err
    faults = ended.events("FaultNoticed")
    assert [(f["kind"], f["injured_rank"], f["step"]) for f in faults] == [
        ("stall", 1, 3),
        ("stall", 1, 7),
        ("stall", 1, 7),
    ]
    for fault, words in zip(
        faults,
        ("after step 3, idle; limit 1.0 s", "in the phase 'eval', after step 7", "in set-up or the first step"),
        strict=True,
    ):
        assert words in fault["text"]
        assert "no progress for" in fault["text"]
    assert len({n["pid"] for n in ended.of("step")}) == 2


STUBBORN = """
def swallow():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
def turn_into_an_exit():
    try:
        time.sleep(1000)
    except BaseException:
        sys.exit(3)
def once(name, rank):
    if int(os.environ["RANK"]) == rank and not os.path.exists(name):
        open(name, "w").close()
        return True
    return False
once("top", 1) and time.sleep(1000)
@everstep.resilient
def train(run):
    once("setup", 1) and time.sleep(1000)
    for step in run.steps(16):
        step == 5 and once("swallow", 0) and swallow()
        step == 10 and once("exit", 1) and turn_into_an_exit()
        dist.barrier()
        note("step", step=step)
        time.sleep(0.02)
note("returned")
train()
"""


def test_a_rank_that_does_not_begin_is_replaced_and_so_is_one_that_does_not_leave(start):
    """Hangs above the wrapped call and in set-up; an interrupt that is swallowed for ever, one that becomes an exit."""
    job = start(STUBBORN, "--nproc-per-node", "2", "--soft-timeout", "1", "--first-timeout", "3")
    ended = job.ended(100)
    assert ended.code == 0, ended.err
    assert [(f["kind"], f["injured_rank"]) for f in ended.events("FaultNoticed")] == [
        ("wedged", 1),
        ("stall", 1),
        ("stall", 0),
        ("stall", 1),
    ]
    assert {n["step"] for n in ended.of("step")} == set(range(1, 17))
    assert len({n["pid"] for n in ended.of("step") if n["rank"] == 0}) == 2
    assert len({n["pid"] for n in ended.of("step") if n["rank"] == 1}) == 1


AFTER = """
@everstep.resilient
def train(run):
    for step in run.steps(5):
        dist.barrier()
    note("after", generation=run.generation)
    if run.rank == 0 and run.generation == 0:
        time.sleep(1000)
    return run.generation
note("returned", value=train())
"""


def test_what_hangs_after_the_loop_is_ended_too(start):
    """A final save that never ends; the other rank has returned and waits for it."""
    ended = start(AFTER, "--nproc-per-node", "2", "--first-timeout", "3").ended(100)
    assert ended.code == 0, ended.err
    (fault,) = ended.events("FaultNoticed")
    assert (fault["kind"], fault["injured_rank"], fault["step"]) == ("stall", 0, 5)
    assert "after the loop of steps" in fault["text"]
    assert "in train" in fault["stack"]
    assert [n["value"] for n in ended.of("returned")] == [1, 1]


DDP = """
@everstep.resilient
def train(run):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(20, model=model, optimizer=optimizer):
        if step == 10 and run.rank == 0:
            until = time.monotonic() + 8
            while time.monotonic() < until:
                sum(range(1000))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        note("step", step=step)
train()
"""


def test_who_waits_in_ddp_s_backward_for_a_rank_that_evaluates_does_not_hang(start):
    """At defaults: 8 s of Python on rank 0; the other stands still and idle for as long, under autograd's frame."""
    ended = start(DDP, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    assert ended.events("FaultNoticed") == []
    ten = [n["at"] for n in ended.of("step") if n["step"] in (9, 10) and n["rank"] == 1]
    assert ten[1] - ten[0] > 7
