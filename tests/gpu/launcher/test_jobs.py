"""Whole jobs with their state on a GPU: every fault, and the run is its twin's to the bit; restarts leave nothing."""

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
JOB = (Path(__file__).parent / "job.py").read_text()
GLOO = "cpu:gloo,cuda:gloo"
WORLDS = {
    "FSDP2, two ranks over gloo": (2, {"PARALLEL": "FSDP2", "BACKEND": GLOO}),
    "DDP, two ranks over gloo": (2, {"PARALLEL": "DDP", "BACKEND": GLOO}),
    "FSDP2, one rank over NCCL": (1, {"PARALLEL": "FSDP2", "BACKEND": "nccl"}),
    "DDP, two ranks over NCCL": (2, {"PARALLEL": "DDP", "BACKEND": "nccl", "SHARED": "1"}),
    "FSDP2, two ranks over NCCL": (2, {"PARALLEL": "FSDP2", "BACKEND": "nccl", "SHARED": "1"}),
}
PLANS = {
    "host": ["exception", "hang in sleep", "SIGKILL", "out of memory", "SIGSTOP", "SIGKILL", "held GIL", "hang in C"],
    "device": ["lost context", "hang in synchronize", "exception"],
}
LETHAL = {"SIGKILL", "SIGSTOP", "held GIL", "lost context", "hang in synchronize"}


def ended(job, limit_s):
    """Wait for a job; one that does not end tells where it stands."""
    try:
        found = job.ended(limit_s)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"")[-3000:].decode(errors="replace")
        notes = "\n".join(json.dumps(n) for n in job.notes()[-8:])
        events = "\n".join(json.dumps(e)[:400] for e in job.events()[-25:])
        raise AssertionError(f"no end within {limit_s} s\n{said}\n{notes}\n{events}") from None
    assert found.code == 0, found.err[-6000:]
    return found


def story(found):
    """What was noticed when, after which fault: for a reader."""
    faults = [n for n in found.of("fault") if "kind" in n]
    told = []
    for event in found.events("FaultNoticed"):
        before = [n for n in faults if n["at"] <= event["mono_s"] + 0.5]
        after_s = round(event["mono_s"] - before[-1]["at"], 2) if before else None
        told.append([before[-1]["kind"] if before else "", event["kind"], event["injured_rank"], after_s])
    return told


def run(start, world, env, plan, steps, limit_s=240):
    env = env | {"STEPS": str(steps), "PLAN": json.dumps(plan)}
    found = ended(start(JOB, "--nproc-per-node", str(world), env=env), limit_s)
    losses: dict[tuple[int, int], set[str]] = {}
    for n in found.of("step"):
        losses.setdefault((n["rank"], n["step"]), set()).add(n["loss"])
    assert set(losses) == {(rank, step) for rank in range(world) for step in range(1, steps + 1)}
    return found, losses, {n["rank"]: n["state"] for n in found.of("end")}


def recovered_s(found):
    """Seconds from each fault to the end of the next step that its rank ends."""
    steps = sorted((n["at"], n["rank"]) for n in found.of("step"))
    told = []
    for fault in found.of("fault"):
        after = [at for at, rank in steps if at > fault["at"] and rank == fault["rank"]]
        told.append((fault["kind"], round(after[0] - fault["at"], 2) if after else None))
    return told


@pytest.mark.parametrize("faults", PLANS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_job_ends_as_its_twin_to_the_bit(start, world, faults):
    """One fault after the other, on one rank and then the other; who can be kept is kept, who cannot is replaced."""
    ranks, env = WORLDS[world]
    plan = [(kind, number % ranks, 4 + 3 * number) for number, kind in enumerate(PLANS[faults])]
    steps = plan[-1][2] + 4
    _, spared, state = run(start, ranks, env, [], steps)
    found, losses, hurt = run(start, ranks, env, plan, steps)
    print(json.dumps({"world": world, "recovered_s": recovered_s(found), "noticed_s": story(found)}))
    assert [n["number"] for n in found.of("fault")] == list(range(len(plan)))
    assert losses == spared
    assert hurt == state
    lost = sum(kind in LETHAL for kind, _, _ in plan)
    pids = {n["pid"] for n in found.of("enter")}
    assert len(pids) == ranks + lost, (story(found), found.err[-3000:])


CLOSE = """
@everstep.resilient(backend="cpu:gloo,cuda:gloo")
def train(run):
    model = torch.nn.Linear(64, 64, device=run.device)
    optimizer = torch.optim.AdamW(model.parameters())
    note("enter", generation=run.generation)
    if run.generation in (2, 4) and run.rank == 1: raise RuntimeError("at its entry")
    for step in run.steps(12, model=model, optimizer=optimizer):
        model(torch.ones(4, 64, device=run.device)).sum().backward()
        if step == 3 + run.generation and run.generation < 6 and run.rank == run.generation % 2:
            note("fault", generation=run.generation)
            if run.generation == 3: os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"in generation {run.generation}")
        total = torch.ones(1, device=run.device)
        dist.all_reduce(total)
        optimizer.step()
    note("end", total=total.item())
train()
"""


def test_faults_less_than_a_second_apart(start):
    """Six and more, each at the first or second step of the generation before, one at its entry."""
    found = ended(start(CLOSE, "--nproc-per-node", "2"), 200)
    assert [n["total"] for n in found.of("end")] == [2.0, 2.0]
    times = [n["at"] for n in found.of("fault")]
    print(json.dumps({"seconds_between_faults": [round(b - a, 2) for a, b in pairwise(times)]}))
    assert len(times) >= 4


LOOK = """
import gc, threading
from collections import Counter
def files(pid):
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try: names.append(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0])
        except OSError: pass
    return dict(Counter(names))
def look():
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    free, total = torch.cuda.mem_get_info()
    return {
        "mib": int(lines["VmRSS"].split()[0]) / 1024, "threads": int(lines["Threads"]), "files": files(os.getpid()),
        "tensors": len(tensors), "cuda": sum(t.is_cuda for t in tensors), "shm": len(os.listdir("/dev/shm")),
        "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
        "device_mib": (total - free) >> 20, "python_threads": threading.active_count(),
    }
"""

GROWTH = (
    LOOK
    + """
@everstep.resilient(backend=os.environ["BACKEND"])
def train(run):
    torch.ones(1, device=run.device)
    seen = look()
    if run.rank == 0: note("look", generation=run.generation, **seen)
    model = torch.nn.Sequential(*[torch.nn.Linear(2000, 2000, device=run.device) for _ in range(2)])  # 32 MB
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    other = dist.new_group()
    kept = torch.ones(1_000_000, device=run.device)
    stream = torch.cuda.Stream()
    for step in run.steps(RESTARTS + 2, model=model, optimizer=optimizer):
        model(torch.ones(8, 2000, device=run.device)).sum().backward()
        dist.all_reduce(torch.ones(1, device=run.device), group=other)
        if step == run.generation + 1 <= RESTARTS and step % run.world_size == run.rank:
            with torch.cuda.stream(stream): torch.cuda._sleep(10_000_000)
            raise RuntimeError(f"at {step}", kept)
        optimizer.step()
        optimizer.zero_grad()
train()
"""
)


@pytest.mark.parametrize(("ranks", "backend"), [(2, GLOO), (1, "nccl")])
def test_a_hundred_restarts_leave_nothing_on_the_device(start, tmp_path, ranks, backend):
    """IR-01: after the last a process holds what it held after the first, and the GPU as much in all."""
    restarts = 100
    disk = ("--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "10")
    text = GROWTH.replace("RESTARTS", str(restarts))
    found = ended(start(text, "--nproc-per-node", str(ranks), *disk, env={"BACKEND": backend}), 380)
    looks = found.of("look")
    assert [n["generation"] for n in looks] == list(range(restarts + 1)), found.err[-5000:]
    assert len({n["pid"] for n in looks}) == 1
    first, last = looks[1], looks[-1]
    each_s = round((last["at"] - first["at"]) / (restarts - 1), 3)
    shown = ("mib", "threads", "cuda", "tensors", "allocated", "reserved", "device_mib")
    told = {name: [round(n[name], 1) for n in (first, looks[restarts // 2], last)] for name in shown}
    told["files"] = [sum(n["files"].values()) for n in (first, looks[restarts // 2], last)]
    print(json.dumps({"restarts": restarts, "backend": backend, "each_s": each_s} | told))
    for what in ("cuda", "tensors", "allocated", "shm", "python_threads"):
        assert last[what] == first[what], (what, [n[what] for n in looks])
    for what, most in (("reserved", 64 << 20), ("device_mib", 64), ("threads", 0), ("mib", 64)):
        assert last[what] <= max(n[what] for n in looks[1:50]) + most, (what, [n[what] for n in looks])
    assert sum(last["files"].values()) <= max(sum(n["files"].values()) for n in looks[1:50])
