"""Faults of every kind in every callback and phase of a wrapped call, one to three an iteration, from seeds."""

import pytest

pytestmark = pytest.mark.procs

STORM = """
import datetime, random
import everstep.inprocess as inprocess
PLACES = ["initialize", "health", "finalize", "health after", "loop", "loop", "atomic", "before groups", "last barrier"]
KINDS = ["exception", "exception", "sleep", "kill", "lock", "exit", "base"]
def hold_the_interpreter():
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while True: libc.pthread_mutex_lock(lock)
def plan(iteration):
    dice = random.Random(f"{SEED}/{iteration}")
    return [(dice.randrange(4), dice.choice(PLACES), dice.choice(KINDS)) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
def hurt(place, iteration):
    for rank, where, kind in plan(iteration):
        fired = f"fired-{iteration}-{rank}-{where}-{kind}"
        if (rank, where) == (int(os.environ["RANK"]), place) and iteration < COUNT and not os.path.exists(fired):
            open(fired, "w").close()
            note("fault", place=place, kind=kind)
            if kind == "exception": raise ValueError(f"{place} of {iteration} on {rank}")
            if kind == "sleep": time.sleep(1000)
            if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if kind == "lock": hold_the_interpreter()
            if kind == "exit": os._exit(3)
            raise GeneratorExit("not an Exception")
class Begins(inprocess.initialize.Initialize):
    def __call__(self, state): hurt("initialize", state.iteration); return state
class Checks(inprocess.health_check.HealthCheck):
    last = None
    def __call__(self, state):
        place, self.last = "health after" if self.last == state.iteration else "health", state.iteration
        hurt(place, state.iteration)
        return state
class Finalizes(inprocess.finalize.Finalize):
    def __call__(self, state): hurt("finalize", state.iteration); return state
def seconds(n): return datetime.timedelta(seconds=n)
@inprocess.Wrapper(initialize=Begins(), health_check=Checks(), finalize=Finalizes(),
                   soft_timeout=seconds(2), hard_timeout=seconds(10), barrier_timeout=seconds(20),
                   heartbeat_timeout=seconds(15))
def train(call: inprocess.CallWrapper):
    rank, iteration = int(os.environ["RANK"]), call.iteration
    note("enter", iteration=iteration)
    hurt("before groups", iteration)
    dist.init_process_group("gloo")
    for step in range(4):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 4
        call.ping()
        with call.atomic(): hurt("atomic", iteration)
        if step == 2: hurt("loop", iteration)
    dist.barrier()
    hurt("last barrier", iteration)
    dist.barrier()
    if iteration < COUNT:  # a plan whose faults lie where this attempt does not come
        if rank == 0: raise RuntimeError(f"on to {iteration + 1}")
        dist.barrier()
    return iteration
note("returned", value=train())
"""


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 4), *(pytest.param(s, 20, marks=[pytest.mark.long, pytest.mark.timeout(600)]) for s in (1, 2, 3))],
)
def test_a_storm_of_faults_is_weathered(start, head, seed, count):
    """Every rank that can be kept or replaced is; the world keeps its size, and the last attempt completes."""
    text = STORM.replace("SEED", str(seed)).replace("COUNT", str(count))
    job = start(head + text, "--nproc-per-node", "4", "--spares", "2", "--max-restarts", "200", wrapped=None)
    ended = job.ended(560)
    assert ended.code == 0, ended.err[-3000:]
    values = {n["value"] for n in ended.of("returned")}
    assert len(values) == 1
    assert values.pop() >= count
    assert len(ended.of("returned")) == 4
    assert len(ended.of("fault")) >= count // 2, "few of the planned faults were reached"
