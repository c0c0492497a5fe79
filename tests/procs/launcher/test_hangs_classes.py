"""Each class of hang in one job, ended from outside: the rank named with its stack, the world as large as before."""

import pytest

pytestmark = pytest.mark.procs

CLASSES = """
import socket, subprocess, threading
HANGS = {}
def hang(step):
    def register(function):
        HANGS[step] = function
        return function
    return register
@hang(6)
def in_sleep(run): time.sleep(1000)
@hang(12)
def in_lock(run):
    lock = threading.Lock(); lock.acquire(); lock.acquire()
@hang(18)
def in_socket(run):
    ours, theirs = socket.socketpair(); ours.recv(1)
@hang(24)
def in_c(run): ctypes.CDLL(None).sleep(1000)
@hang(30)
def in_c_with_the_lock(run): ctypes.PyDLL(None).sleep(1000)
@hang(36)
def in_sigstop(run): os.kill(os.getpid(), signal.SIGSTOP)
@hang(42)
def in_bytecode(run):
    while True: pass
@hang(48)
def not_in_the_collective(run): threading.Event().wait()
def once(step):
    name = f"hung-{step}"
    if os.path.exists(name):
        return False
    open(name, "w").close()
    return True
@everstep.resilient
def train(run):
    note("enter", generation=run.generation, world=dist.get_world_size())
    for step in run.steps(52):
        for _ in range(4 if step >= 37 else 0):
            run.ping()
        if run.rank == (step // 6) % 2 and step in HANGS and once(step):
            note("hang", step=step)
            HANGS[step](run)
        dist.barrier()
        note("step", step=step)
        time.sleep(0.05)
train()
"""
EXPECTED = [
    ("stall", 6, "in_sleep"),
    ("stall", 12, "in_lock"),
    ("stall", 18, "in_socket"),
    ("stall", 24, "in_c"),
    ("wedged", 30, "in_c_with_the_lock"),
    ("wedged", 36, ""),
    ("stall", 42, "in_bytecode"),
    ("stall", 48, "not_in_the_collective"),
]
DEFAULTS = pytest.param((), 30.0, id="defaults", marks=[pytest.mark.long, pytest.mark.timeout(400)])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("flags", "within_s"), [DEFAULTS, pytest.param(("--soft-timeout", "1.5"), 20.0, id="1.5 s")])
def test_every_class_of_hang_is_ended_and_its_rank_named_with_its_stack(start, flags, within_s):
    """A sleep, a lock, a socket, C with and without the interpreter lock, SIGSTOP, bytecode, a no-show."""
    ended = start(CLASSES, "--nproc-per-node", "2", "--spares", "1", *flags).ended(390)
    assert ended.code == 0, ended.err
    faults = ended.events("FaultNoticed")
    assert [(f["kind"], f["injured_rank"], f["step"]) for f in faults] == [
        (kind, (step // 6) % 2, step - 1) for kind, step, _ in EXPECTED
    ]
    for fault, (_, _, name) in zip(faults, EXPECTED, strict=True):
        assert name in fault["stack"], fault
    hangs = {n["step"]: n["at"] for n in ended.of("hang")}
    for fault, (_, step, _) in zip(faults, EXPECTED, strict=True):
        assert fault["mono_s"] - hangs[step] < within_s
    assert {n["world"] for n in ended.of("enter")} == {2}
    assert {n["step"] for n in ended.of("step")} == set(range(1, 53))
    assert len({n["pid"] for n in ended.of("enter")}) == 4, "two were replaced, all others stayed"
