"""Scripts that do what users do: daemons, pools, broken pipes, broken exceptions; and what they may not do."""

import os
import subprocess

import pytest

pytestmark = pytest.mark.procs

EVERYTHING = """
import json, threading, subprocess, multiprocessing as mp
from torchdata.stateful_dataloader import StatefulDataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((4,), float(i))

def double(x): return 2 * x

def daemon():
    if os.fork(): return os.wait()
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("daemon", generation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    while True: time.sleep(100)

def living(pids):
    # not gone within a second: who is killed ends when it is next scheduled
    for _ in range(100):
        stats = [f"/proc/{pid}/stat" for pid in pids if os.path.exists(f"/proc/{pid}/stat")]
        try:
            left = [stat for stat in stats if open(stat).read().rpartition(")")[2].split()[0] not in "ZX"]
        except OSError:
            continue
        if not left:
            break
        time.sleep(0.01)
    return left

def told(what):
    return [json.loads(line) for line in open(os.environ["NOTES"]) if json.loads(line)["what"] == what]

@everstep.resilient
def train(run):
    dist.barrier()
    note("enter", generation=run.generation, daemons=living(n["pid"] for n in told("daemon")))
    dist.barrier()
    daemon()
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    if not run.generation:
        with mp.get_context("spawn").Pool(1) as pool: assert pool.map(double, [1, 2]) == [2, 4]
    with mp.get_context("fork").Pool(1) as pool: assert pool.map(double, [1, 2]) == [2, 4]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = StatefulDataLoader(Data(), batch_size=2, shuffle=True, num_workers=2)
    for step, batch in run.steps(9, loader, model=model, optimizer=optimizer):
        loss = model(batch).sum()
        loss.backward()
        for p in model.parameters(): dist.all_reduce(p.grad)
        sys.stdout.buffer.write(b"\\xff\\xfe not utf-8\\n")
        for at, rank, fault in ((3, 1, lambda: 1 / 0), (6, 0, lambda: os.kill(os.getpid(), 9))):
            if step == at and run.rank == rank and not os.path.exists(f"fired{at}"):
                open(f"fired{at}", "w").close()
                fault()
        optimizer.step()
        optimizer.zero_grad()
        note("step", step=step, loss=loss.item().hex())
    return 7

def talk_nonsense():
    from everstep.recovery import session
    me = session.current()
    for message in (
        {"no": 1}, {"kind": 3}, {"kind": "world.fault"}, {"kind": "world.step_on_it"}, {"kind": "snapshot.attach"},
        {"kind": "disk.staged", "save": []}, {"kind": "progress.step", "values": 7}, {"kind": "x" * 10**6},
    ):
        me.send(message)
    for packet in (b"{]", b"[]", b"@", bytes(200)):
        os.write(me.link.fileno(), packet)

if __name__ == "__main__":
    talk_nonsense()
    note("top", stdin=sys.stdin.read() if os.environ["RANK"] == "0" else "", big=len(os.environ["BIG"]))
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    note("returned", value=train(), daemons=living(n["pid"] for n in told("daemon")))
"""


def test_a_script_may_do_all_that_scripts_do(start):
    """Daemons, pools, loader workers, threads, stdin, 200 KB of environment, bytes that are no text: LA-06."""
    big = {"BIG": "x" * 100_000, "BIG2": "y" * 100_000}
    job = start(EVERYTHING, "--nproc-per-node", "2", "--tee", "3", env=big, streams={"stdin": subprocess.PIPE})
    job.process.stdin.write("hello\n")
    job.process.stdin.close()
    job.process.stdin = None
    ended = job.ended(100)
    assert ended.code == 0, ended.err
    assert {(n["rank"], n["stdin"]) for n in ended.of("top")} == {(0, "hello\n"), (1, ""), (0, "")}
    assert {n["big"] for n in ended.of("top")} == {100_000}
    assert [n["value"] for n in ended.of("returned")] == [7, 7]
    for rank in (0, 1):
        done = {n["step"]: n["loss"] for n in ended.of("step") if n["rank"] == rank}
        assert sorted(done) == list(range(1, 10))
    assert len(ended.of("daemon")) == 6
    assert [n["daemons"] for n in ended.of("enter")] == [[]] * 6, "a daemon of an earlier generation lives"
    assert "said 'world.fault' in a form that is unknown here" in ended.err
    assert "said 'snapshot.attach' in a form that is unknown here" in ended.err
    job.gone_within(0.5)


BROKEN = """
class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__
class Unpicklable(Exception):
    def __init__(self): super().__init__(lambda: 0); self.lock = __import__("threading").Lock()
class Deep(BaseException):
    pass
def swallow():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
def chained():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise ValueError("after") from error
def throw(error):
    raise error
FAULTS = [
    (2, None, lambda: throw(Mute())),
    (3, 0, lambda: throw(Unpicklable())),
    (4, 1, lambda: throw(Deep("\\udcff"))),
    (5, 0, lambda: throw(GeneratorExit())),
    (6, 1, lambda: throw(StopIteration(1))),
    (7, 0, chained),
    (8, None, lambda: throw(RuntimeError("x" * 10**6))),
    (9, 1, lambda: throw(ExceptionGroup("several", [ValueError(1), Mute()]))),
    *((step, step % 2, lambda: 1 / 0) for step in range(10, MANY)),
]
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in run.steps(MANY + 1, model=model, optimizer=optimizer):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        for p in model.parameters(): dist.all_reduce(p.grad)
        for at, rank, fault in FAULTS:
            if at == step and rank in (None, run.rank) and not os.path.exists(f"fired-{at}-{run.rank}"):
                open(f"fired-{at}-{run.rank}", "w").close()
                if rank is None:
                    dist.barrier()
                fault()
        optimizer.step()
        optimizer.zero_grad()
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        agent = dict(line.split(":", 1) for line in open(f"/proc/{status['PPid'].strip()}/status").read().splitlines())
        note("step", step=step, loss=loss.item().hex(), fds=len(os.listdir("/proc/self/fd")),
             kib=int(status["VmRSS"].split()[0]), agent_kib=int(agent["VmRSS"].split()[0]),
             threads=int(status["Threads"]),
             agent_fds=len(os.listdir(f"/proc/{status['PPid'].strip()}/fd")))
    return 7
note("returned", value=train())
"""


@pytest.mark.parametrize("many", [20, pytest.param(60, marks=pytest.mark.long)])
def test_faults_in_a_row_and_exceptions_of_every_make_cost_nothing_that_lasts(start, many):
    """IR-12; and over the restarts neither a survivor nor the agent grows."""
    ended = start(BROKEN.replace("MANY", str(many)), "--nproc-per-node", "2").ended(100)
    assert ended.code == 0, ended.err
    assert [n["value"] for n in ended.of("returned")] == [7, 7]
    steps = ended.of("step")
    assert len({n["pid"] for n in steps}) == 2
    assert {n["step"] for n in steps} == set(range(1, many + 2))
    assert len(steps) <= 2 * (many + 1) + 2 * (many - 2)
    assert "RuntimeError: no text" not in ended.err.splitlines()[-1]
    for name, slack in (("fds", 2), ("agent_fds", 2), ("threads", 1), ("kib", 20_000), ("agent_kib", 4_000)):
        for rank in (0, 1):
            mine = [n[name] for n in steps if n["rank"] == rank]
            assert max(mine[-3:]) <= mine[5] + slack, (name, mine)


def test_output_that_nobody_reads_is_lost_and_not_the_training(start):
    """`| head -1`, and a console that is closed from the start (LA-23)."""
    text = """
@everstep.resilient
def train(run):
    for step in run.steps(5):
        print("step", step, "x" * 10_000)
        sys.stderr.write("err\\\\n" * 1000)
        os.system("echo from a child")
        dist.barrier()
        time.sleep(0.05)
        if step == 3 and not run.generation:
            1 / 0
train()
note("returned")
"""
    job = start(text, "--nproc-per-node", "2", streams={"stderr": None, "preexec_fn": lambda: os.close(2)})
    job.process.stdout.readline()
    job.process.stdout.close()
    job.process.stdout = None
    assert job.process.wait(60) == 0
    assert len([n for n in job.notes() if n["what"] == "returned"]) == 2


REFUSED = """
import threading
@everstep.resilient
def train(run):
    for step in run.steps(2):
        dist.barrier()
def other():
    {call}
note("top")
{before}
thread = threading.Thread(target=other)
{body}
{after}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("parts", "words", "code"),
    [
        ({"body": "train(); train()"}, "a second wrapped function was called in this process", 64),
        (
            {"call": "train()", "before": "train()", "body": "thread.start(); thread.join()"},
            "a second wrapped function was called in this process",
            64,
        ),
        pytest.param(
            {"body": "train()", "after": "1 / 0"}, "ZeroDivisionError: division by zero", 1, marks=pytest.mark.long
        ),
        pytest.param({"before": "1 / 0"}, "ZeroDivisionError: division by zero", 1, marks=pytest.mark.long),
    ],
)
def test_what_goes_wrong_outside_the_wrapped_call_is_told_and_not_restarted(start, parts, words, code):
    text = REFUSED.format(**{"call": "pass", "before": "", "body": "", "after": "", **parts})
    ended = start(text, "--nproc-per-node", "2").ended()
    assert ended.code == code, ended.err
    assert words in ended.err
    assert 1 <= len(ended.of("top")) <= 2  # the first failure may end the other before it begins


@pytest.mark.long
def test_a_run_folder_is_held_by_one_job_and_may_be_used_again(start):
    text = """
@everstep.resilient
def train(run):
    note("enter", generation=run.generation)
    model = torch.nn.Linear(2, 2)
    for step in run.steps(int(sys.argv[1]), model=model):
        dist.barrier()
        note("step", step=step)
        while os.path.exists("wait"):
            time.sleep(0.01)
train()
"""
    flags = ("--nproc-per-node", "2", "--fault-count", "1", "--fault-types", "exception", "--fault-steps", "12",
             "--checkpoint-dir", "ckpt", "--checkpoint-interval", "2")  # fmt: skip
    job = start(text, *flags, args=("12",))
    (job.folder / "wait").touch()
    job.wait_for("step", 2)
    refused = start("note('top')", run_dir=job.run_dir).ended()
    assert refused.code == 78
    assert "belongs to a job that is still running" in refused.err
    (job.folder / "wait").unlink()
    first = job.ended()
    assert first.code == 0, first.err
    assert len(first.events("FaultInjected")) == 1
    again = start(text, *flags, args=("14",), again=job).ended()
    assert again.code == 0, again.err
    assert len(again.events("FaultInjected")) == 1  # of both runs: once a job (FI-01)
    steps = [n["step"] for n in again.of("step")][len(first.of("step")) :]
    assert set(steps) == {13, 14}, "it goes on from the checkpoint"
