"""Hangs of a function that says nothing of its steps, at the wrapper's defaults: seen by its loop."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

HEAD = Path(__file__).with_name("wrapper_head.txt").read_text()

LEARNED_S = 30.0
"""Between what is learned here (5 and 10 s) and NVRx's own 60 and 90 s."""

HANGS = """
def sleeps(): time.sleep(3600)
def in_c(): ctypes.CDLL(None).pause()
def holds_the_lock():
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while True: libc.pthread_mutex_lock(lock)
KINDS = [sleeps, sleeps, in_c, holds_the_lock]
@Wrapper()
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    meet()
    note("enter", iteration=call.iteration, of=rank)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(40):
        if rank == 1 and call.iteration < len(KINDS) and step == 12 + 5 * call.iteration:
            note("hang")
            KINDS[call.iteration]()
        if OPTIMIZES:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        dist.barrier()
train()
note("returned")
"""


@pytest.mark.parametrize("optimizes", [True, pytest.param(False, marks=pytest.mark.long)])
def test_hangs_are_seen_by_the_turns_of_the_loop(start, optimizes):
    """Two at one place, the second further on: the first was ended and has taught that place nothing. Then in C, and
    with the interpreter lock held. Turns are those of an optimizer, or of a line that calls a collective.
    """
    ended = start(HEAD + HANGS.replace("OPTIMIZES", str(optimizes)), "--nproc-per-node", "2").ended(220)
    assert ended.code == 0, ended.err
    faults = ended.events("FaultNoticed")
    assert [(f["kind"], f["injured_rank"]) for f in faults] == [("stall", 1)] * 3 + [("wedged", 1)]
    for fault, hang in zip(faults, ended.of("hang"), strict=True):
        assert fault["mono_s"] - hang["at"] < LEARNED_S
    assert all("turns of its loop" in fault["text"] for fault in faults[:3])
    pids = {(n["of"], n["pid"]) for n in ended.of("enter")}
    assert len(pids) == 3, "one process was replaced, for it held its interpreter lock"


OPTED_OUT = """
@Wrapper(soft_timeout=seconds(1.5), hard_timeout=seconds(2.5))
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    meet()
    note("enter", iteration=call.iteration, of=rank)
    if rank == 1:
        with call.disable_hang_protection():
            ctypes.PyDLL(None).sleep(4)
            note("allowed", iteration=call.iteration)
            if call.iteration == 0: ctypes.string_at(0)
            if call.iteration == 1: raise ValueError("inside")
    dist.barrier()
train()
note("returned")
"""


def test_who_may_hold_the_interpreter_lock_for_long_may_crash_meanwhile(start):
    """HD-06: 4 s with the lock held, under limits of 1.5 and 2.5, opted out of: let be. What crashes inside, by
    a signal or an exception, is handled all the same.
    """
    ended = start(HEAD + OPTED_OUT, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    assert [n["iteration"] for n in ended.of("allowed")] == [0, 1, 2]
    faults = [(f["kind"], f["injured_rank"]) for f in ended.events("FaultNoticed")]
    assert {kind for kind, _ in faults} == {"death", "exception"}
    assert [one for one in faults if one[1] == 1] == [("death", 1), ("exception", 1)], "rank 0 may have lost its peer"
    assert len(ended.of("returned")) == 2


SLOW = """
import subprocess
class Slow:
    def __init__(self): self.left = 60.0
    def write(self, data):
        if self.left > 0:
            time.sleep(min(self.left, 20.0)); self.left -= 20.0
        return len(data)
    def flush(self): pass
@Wrapper()
def train(call: CallWrapper):
    rank = int(os.environ["RANK"])
    meet()
    note("enter", iteration=call.iteration, of=rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(200):
        if step == 0 and rank == 1 and call.iteration == 0: time.sleep(60)
        if step == 40 and rank == 0 and call.iteration == 0:
            until = time.monotonic() + 40
            while time.monotonic() < until: sum(range(1000))
        if step == 80 and rank == 0 and call.iteration == 0: torch.save(model.state_dict(), Slow())
        if step == 120 and rank == 0:
            note("waits", iteration=call.iteration)
            subprocess.run(["sleep", "40"], check=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    if rank == 0: time.sleep(50)
train()
note("returned")
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_is_slow_is_not_hung_where_no_step_is_declared(start):
    """A first step of 60 s, 40 s of evaluation while the other waits in DDP, a save of 60 s, 50 s after the loop: no
    alarm. 40 s for a child: one, and then its place has the time.
    """
    ended = start(HEAD + SLOW, "--nproc-per-node", "2").ended(560)
    assert ended.code == 0, ended.err
    assert [(f["kind"], f["injured_rank"]) for f in ended.events("FaultNoticed")] == [("stall", 0)]
    assert [n["iteration"] for n in ended.of("waits")] == [0, 1]
    assert len({n["pid"] for n in ended.of("enter")}) == 2
    told = [e for e in ended.events("LimitLearned") if "script.py:" in e["place"]]
    assert any("is raised from 5 s to 50 s" in e["text"] for e in told)
