"""Whoever dies on a node, in whatever order, the job goes on for as long as it can, and ends with its agent."""

import contextlib
import os
import random
import signal
import time

import pytest

pytestmark = pytest.mark.procs

TRAIN = """
lock = __import__("threading").Lock()
@everstep.resilient
def train(run):
    note("enter", generation=run.generation)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in run.steps(10**6, model=model, optimizer=optimizer):
        total = model(torch.ones(2, 4)).sum()
        total.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        over = torch.tensor(float(run.rank == 0 and os.path.exists("finish")))
        dist.all_reduce(over)
        if run.rank == 1 and os.path.exists("raise"):
            os.unlink("raise")
            1 / 0
        optimizer.step()
        optimizer.zero_grad()
        note("step", step=step, loss=total.item().hex(), generation=run.generation)
        if over:
            break
        time.sleep(0.02)
train()
"""


class Injured:
    """A job whose processes are ended by name."""

    def __init__(self, job):
        self.job = job

    def living(self, name: str) -> list[int]:
        """Processes by the name they were born with, ranks apart."""
        events = self.job.events()
        ended = [e["child_pid"] for e in events if e["event"] == "ProcessEnded"]
        ended += [m[2] for e in events if e["event"] == "GenerationStarted" for m in e["members"]]
        started = [e["child_pid"] for e in events if e["event"] == "ProcessStarted" and e["name"].startswith(name)]
        return [pid for pid in started if pid not in ended and os.path.exists(f"/proc/{pid}")]

    def hurt(self, *names: str, number: int = signal.SIGKILL) -> list[int]:
        pids = [pid for name in names for pid in self.living(name)]
        assert pids, f"no {names} to hurt"
        for pid in pids:
            os.kill(pid, number)
        return pids

    def rank(self, rank: int) -> int:
        return [n["pid"] for n in self.job.notes() if n["what"] == "enter" and n["rank"] == rank][-1]

    def wait(self, what, text: str, limit_s: float = 40.0):
        deadline = time.monotonic() + limit_s
        while not (found := what()):
            assert self.job.process.poll() is None, (text, self.job.process.communicate())
            assert time.monotonic() < deadline, f"{text}: not in {limit_s} s"
            time.sleep(0.05)
        return found

    def steps_on(self, count: int = 3, limit_s: float = 40.0) -> None:
        """Wait until the job has done `count` more steps than ever before."""
        best = max((n["step"] for n in self.job.notes() if n["what"] == "step"), default=0)
        self.wait(
            lambda: any(n["what"] == "step" and n["step"] >= best + count for n in self.job.notes()),
            f"step {best + count}",
            limit_s,
        )


def whole(ended, faults: int) -> None:
    """One loss a step, none left out, at most one more execution a fault."""
    losses: dict[int, set[str]] = {}
    for note in ended.of("step"):
        losses.setdefault(note["step"], set()).add(note["loss"])
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert all(len(values) == 1 for values in losses.values())
    for rank in (0, 1):
        done = [n["step"] for n in ended.of("step") if n["rank"] == rank]
        assert len(done) <= max(losses) + faults


def test_every_helper_may_die_and_the_job_goes_on(start, tmp_path):
    job = start(
        TRAIN, "--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "20"
    )
    job.wait_for("step", 6)
    hurt = Injured(job)
    hurt.wait(lambda: hurt.living("spare"), "a spare")

    lost = hurt.hurt("spare")  # nobody needs it now: another is made
    hurt.wait(lambda: set(hurt.living("spare")) - set(lost), "another spare")

    hurt.hurt("store")  # running groups need none
    hurt.steps_on()
    (job.folder / "raise").touch()
    hurt.steps_on()

    frozen = hurt.hurt("store", number=signal.SIGSTOP)
    hurt.wait(lambda: set(hurt.living("store")) - set(frozen), "another store")
    (job.folder / "raise").touch()
    hurt.steps_on()

    hurt.hurt("writer")
    hurt.steps_on(25)

    zygote = hurt.hurt("zygote", "spare")  # with a rank dead too, the job waits for the next zygote's first child
    os.kill(hurt.rank(1), signal.SIGKILL)
    hurt.wait(lambda: set(hurt.living("zygote")) - set(zygote), "another zygote")
    hurt.steps_on()
    hurt.wait(lambda: hurt.living("spare"), "a spare of the second zygote")

    frozen = hurt.hurt("zygote", "spare", "writer", number=signal.SIGSTOP)
    hurt.wait(lambda: not [pid for pid in frozen if os.path.exists(f"/proc/{pid}")], "the end of what is frozen")
    (job.folder / "finish").touch()
    ended = job.ended()
    assert ended.code == ("was not saved" in ended.err), ended.err  # a writer that dies over a save spoils the status
    whole(ended, faults=3)
    assert "the zygote ended by signal 9" in ended.err
    assert "the store has gone" in ended.err
    survivors = {n["pid"] for n in ended.of("step") if n["rank"] == 0}
    assert len(survivors) == 1, ended.err
    job.gone_within(1.0)


DAEMONS = """
def daemons():
    \"\"\"One in a session of its own, one forked twice, one deaf to SIGTERM, one that a shell has started.\"\"\"
    import subprocess
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if not os.fork():
        os.setsid()
        if os.fork(): os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("daemon", generation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        while True: time.sleep(100)
    os.wait()
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"])
    subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"])
"""


def test_nothing_outlives_an_agent_that_is_killed_whatever_its_workers_do(start):
    text = f"""{DAEMONS}
@everstep.resilient
def train(run):
    daemons()
    note("up")
    if run.rank == 0:
        time.sleep(1000)
    elif run.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif run.rank == 2:
        ctypes.PyDLL(None).sleep(1000)
    for step in run.steps(10**6):
        time.sleep(0.001)
train()
"""
    job = start(text, "--nproc-per-node", "4")
    job.wait_for("up", 4)
    job.wait_for("daemon", 4)
    job.process.kill()
    job.process.wait()
    assert job.gone_within(2.0) < 2.0


def test_nothing_outlives_an_agent_that_is_killed_before_its_job_begins(start):
    for delay_s in (0.0, 0.4, 1.2):
        job = start("note('top')", "--nproc-per-node", "2")
        hurt = Injured(job)
        hurt.wait(lambda job=job: len(job.left()) > 1, "a zygote")
        time.sleep(delay_s)
        job.process.kill()
        job.process.wait()
        assert job.gone_within(2.0) < 2.0


PHASES = """
@everstep.resilient
def train(run):
    note("enter", generation=run.generation)
    model = torch.nn.Linear(4000, 2000)
    for step in run.steps(3, model=model):
        dist.barrier()
        note("step", step=step, generation=run.generation)
        if "gathering" in sys.argv and step == 2 and not run.generation:
            if run.rank == 1:
                note("raise")
                1 / 0
            with run.atomic():
                note("up")
                time.sleep(1000)
    while "birth" in sys.argv:
        time.sleep(0.1)
train()
"""


@pytest.mark.parametrize(
    "phase", ["draining", *(pytest.param(phase, marks=pytest.mark.long) for phase in ("gathering", "birth"))]
)
def test_nothing_outlives_an_agent_that_is_killed_in_any_phase_and_its_run_can_go_on(start, phase, tmp_path):
    disk = ("--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "2")
    job = start(PHASES, "--nproc-per-node", "2", *disk, args=(phase,))
    hurt = Injured(job)
    if phase == "draining":
        hurt.wait(lambda: [e for e in job.events() if e["event"] == "TierEvent" and e["step"] == 3], "the last save")
    elif phase == "gathering":
        job.wait_for("raise")
        time.sleep(0.3)
    else:
        job.wait_for("step", 6)
        hurt.wait(lambda: hurt.living("spare"), "a spare")
        hurt.hurt("spare")
        time.sleep(0.02)
    job.process.kill()
    job.process.wait()
    assert job.gone_within(2.0) < 2.0
    ended = start(PHASES, "--nproc-per-node", "2", *disk, again=job).ended()
    assert ended.code == 0, ended.err
    assert sorted({n["step"] for n in ended.of("step")}) == [1, 2, 3]
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir() if p.is_dir())[-1].endswith("3"), ended.err


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_any_process_may_die_or_freeze_at_any_time(start, seed, tmp_path):
    rng = random.Random(seed)
    flags = ("--nproc-per-node", "2", "--spares", str(seed % 3), "--soft-timeout", "2", "--first-timeout", "20")
    job = start(TRAIN, *flags, "--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "7")
    job.wait_for("step", 4)
    hurt = Injured(job)
    ranks = 0
    for _ in range(20):
        time.sleep(rng.random() * 0.5)
        whom = rng.choice(["rank 0", "rank 1", "both", "spare", "zygote", "store", "writer", "raise", "raise"])
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself meanwhile
            if whom == "raise":
                (job.folder / "raise").touch()
            elif whom in ("rank 0", "rank 1", "both"):
                for rank in (0, 1) if whom == "both" else (int(whom[-1]),):
                    os.kill(hurt.rank(rank), number)
            elif hurt.living(whom):
                hurt.hurt(whom, number=number)
        if whom in ("rank 0", "rank 1", "both", "raise"):
            ranks += 2
            hurt.steps_on(2, 60)
    (job.folder / "finish").touch()
    ended = job.ended(90)
    assert ended.code == ("was not saved" in ended.err), ended.err
    whole(ended, faults=ranks)
    job.gone_within(1.0)
