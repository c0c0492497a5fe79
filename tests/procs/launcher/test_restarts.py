"""Restart after restart in the same processes: nothing grows, and every generation's groups meet."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

LOOK = """
import gc, logging, threading
from collections import Counter
def files(pid):
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try: names.append(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0])
        except OSError: pass  # the one that lists
    return dict(Counter(names))
def status(pid):
    lines = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    memory, threads = int(lines["VmRSS"].split()[0]) / 1024, int(lines["Threads"])
    return {"mib": memory, "threads": threads, "name": lines["Name"].strip()}
def children(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += open(f"/proc/{pid}/task/{task}/children").read().split()
    return [int(word) for word in found]
def loggers():
    every = [logging.root, *(v for v in logging.root.manager.loggerDict.values() if isinstance(v, logging.Logger))]
    return sum(len(logger.handlers) for logger in every)
def look():
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    own = status(os.getpid())
    return {
        "mib": own["mib"], "threads": own["threads"], "children": len(children(os.getpid())),
        "files": files(os.getpid()),
        "handlers": loggers(), "tensors": len(tensors), "cuda": sum(t.is_cuda for t in tensors),
        "shm": len(os.listdir("/dev/shm")), "python_threads": threading.active_count(),
        "keys": dist.distributed_c10d._get_default_store().num_keys(),
    }
def household():
    agent = os.getppid()
    return {status(pid)["name"]: status(pid) | {"files": sum(files(pid).values())} for pid in [agent, *children(agent)]}
"""

GROWTH = (
    LOOK
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i): return torch.full((2000,), float(i))
@everstep.resilient
def train(run):
    seen = look()
    if run.rank == 0:
        note("look", generation=run.generation, **seen)
        note("household", generation=run.generation, **household())
    model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 2000))  # 32 MB
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    other = dist.new_group()
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=int(run.generation % 5 == 1)))
    kept = open("/dev/null"), __import__("socket").socketpair(), torch.ones(1_000_000)
    threading.Thread(target=time.sleep, args=(0.01,)).start()
    for step in run.steps(RESTARTS + 2, model=model, optimizer=optimizer):
        model(next(batches)).sum().backward()
        dist.all_reduce(torch.ones(1), group=other)
        if step == run.generation + 1 <= RESTARTS:
            if run.generation % 7 == 3:
                if run.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
            elif step % 2 == run.rank:
                raise RuntimeError(f"at {step}", kept)
        optimizer.step()
        optimizer.zero_grad()
train()
"""
)


def growth(start, tmp_path, restarts):
    """Run that many restarts, every seventh of them by a SIGKILL; return what rank 0's process saw at each entry."""
    disk = ("--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "10")
    ended = start(GROWTH.replace("RESTARTS", str(restarts)), "--nproc-per-node", "2", *disk).ended(280)
    assert ended.code == 0, ended.err[-5000:]
    looks = ended.of("look")
    assert [n["generation"] for n in looks] == list(range(restarts + 1)), ended.err[-5000:]
    assert len({n["pid"] for n in looks}) == 1
    return ended, looks


SAME = ("threads", "python_threads", "children", "files", "handlers", "tensors", "cuda", "shm")
MODEL_MIB = 32


@pytest.mark.parametrize("restarts", [10, pytest.param(100, marks=pytest.mark.long)])
def test_nothing_grows(start, tmp_path, restarts):
    """After the last restart a process has what it had after the first, and so have those that serve it."""
    ended, looks = growth(start, tmp_path, restarts)
    for what in SAME:
        assert looks[-1][what] == looks[1][what], (what, [n[what] for n in looks])
    assert looks[-1]["children"] == looks[-1]["cuda"] == 0
    half = len(looks) // 2
    memory = [n["mib"] for n in looks[1:]]
    assert max(memory[half:]) < max(memory[:half]) + MODEL_MIB, memory
    assert min(memory[half:]) < min(memory[:half]) + MODEL_MIB, memory
    agents = ended.of("household")
    for name, most in (("python", 8), ("everstep-zygote", 2), ("store", 2), ("writer-0", 8)):
        serving = [n[name] for n in agents[1:]]
        assert max(n["mib"] for n in serving[half:]) < max(n["mib"] for n in serving[:half]) + most, (name, serving)
        assert sorted(n["files"] for n in serving[half:])[half // 2] <= max(n["files"] for n in serving[:half]), serving


GENERATIONS = """
@everstep.resilient
def train(run):
    total = torch.tensor([float(run.rank), float(run.generation)])
    dist.all_reduce(total)
    assert total.tolist() == [6.0, 4.0 * run.generation], total  # nobody of another generation is in it
    dist.barrier()  # all have made their groups, and with them all keys
    note("met", generation=run.generation, keys=dist.distributed_c10d._get_default_store().num_keys())
    model = torch.nn.Linear(2, 2)
    for step in run.steps(COUNT, model=model):
        dist.all_reduce(torch.ones(1))
        if step == run.generation + 1 < COUNT and run.rank == step % 4:
            raise RuntimeError(f"at {step}")
train()
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_generations_in_a_row_on_four_ranks(start, count):
    """Each makes its groups anew over one living store, and each reduces over exactly its own members.

    The store holds the keys of the present one, and at most those of the last beside them (IR-04).
    """
    ended = start(GENERATIONS.replace("COUNT", str(count)), "--nproc-per-node", "4").ended(280)
    assert ended.code == 0, ended.err[-5000:]
    met = ended.of("met")
    assert sorted((n["generation"], n["rank"]) for n in met) == [(g, r) for g in range(count) for r in range(4)]
    one = max(n["keys"] for n in met if n["generation"] == 0)
    assert one >= 4  # an address a rank at least
    assert max(n["keys"] for n in met) < 3 * one, [n["keys"] for n in met]
    assert len({n["pid"] for n in met}) == 4, [e for e in ended.events("FaultNoticed") if e["kind"] != "exception"]
