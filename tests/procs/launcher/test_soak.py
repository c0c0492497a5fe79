"""A soak: seeded faults of all kinds in one job; its losses are those of a calm one, and nothing is left behind."""

import os

import psutil
import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(1800), pytest.mark.long]
FAULTS = 300
AGENT_MIB = 60
"""Of the agent's resident memory, at the end of it all."""

TRAIN = """
import random
COUNT, CALM = int(os.environ["FAULTS"]), os.environ.get("CALM")
draw = random.Random(20261201)
KINDS = ["exception"] * 55 + ["sigkill"] * 30 + ["exit"] * 5 + ["segfault"] * 4 + ["sigstop", "hang", "gil"] * 2
PLAN = {2 * number + 3: (draw.choice(KINDS), draw.randrange(2)) for number in range(COUNT)}

def fail(step, rank):
    kind, whom = PLAN.get(step, ("", -1))
    if CALM or whom != rank:
        return
    try:
        os.close(os.open(f"fired-{step}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    note("fault", kind=kind, step=step)
    if kind == "exception": raise ValueError("on purpose")
    if kind == "sigkill": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit": os._exit(3)
    if kind == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "sigstop": os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang": time.sleep(3600)
    if kind == "gil": ctypes.PyDLL(None).sleep(3600)

@everstep.resilient
def train(run):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in run.steps(2 * COUNT + 5, model=model, optimizer=optimizer):
        rank = dist.get_rank()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        fail(step, rank)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        note("loss", step=step, loss=loss.item().hex())
    note("trained", files=len(os.listdir("/proc/self/fd")))
    while not CALM and not os.path.exists("end"):
        run.ping()
        time.sleep(0.05)
train()
"""


def losses(notes):
    """By rank and step; a step that is done again has one loss, or is told."""
    found = {}
    for note in notes:
        found.setdefault((note["rank"], note["step"]), set()).add(note["loss"])
    assert all(len(values) == 1 for values in found.values())
    return found


def test_three_hundred_faults_of_all_kinds_leave_the_losses_as_they_are_and_nothing_behind(start, tmp_path):
    env = {"FAULTS": str(FAULTS), "OMP_NUM_THREADS": "1"}
    calm = start(TRAIN, "--nproc-per-node", "2", env=env | {"CALM": "1"}).ended()
    assert calm.code == 0, calm.err
    with (tmp_path / "said").open("w") as said:  # a pipe that nobody reads would fill
        limits = ["--soft-timeout", "3", "--hard-timeout", "8"]
        job = start(TRAIN, "--nproc-per-node", "2", *limits, env=env, streams={"stdout": said, "stderr": said})
    agent = psutil.Process(job.process.pid)
    job.wait_for("fault", 10)
    files = agent.num_fds()
    job.wait_for("trained", 2, limit_s=1500)
    assert agent.num_fds() <= files + 4
    assert agent.memory_info().rss < AGENT_MIB << 20
    (job.folder / "end").touch()
    ended = job.ended()
    assert ended.code == 0, (tmp_path / "said").read_text()[-3000:]
    kinds = [note["kind"] for note in ended.of("fault")]
    assert len(kinds) == FAULTS
    print({kind: kinds.count(kind) for kind in set(kinds)}, f"in {ended.seconds:.0f} s")
    assert losses(ended.of("loss")) == losses(calm.of("loss"))
    assert len(losses(ended.of("loss"))) == 2 * (2 * FAULTS + 5)
    assert not [name for name in os.listdir("/dev/shm") if str(agent.pid) in name]
