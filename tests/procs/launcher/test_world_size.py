"""What the world does where no replacement comes: it keeps its size, waits, shrinks or ends, as it was told."""

import contextlib
import os
import re
import signal
import time

import pytest

from everstep.events import Restored
from everstep.goodput.core.accounting import account
from everstep.goodput.log import read_run

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]

# Its own state, in a file: the position in a stream of samples, which belongs to no rank.
JOB = """
import json
from everstep import inprocess
from everstep.data import GlobalSampler
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
@inprocess.Wrapper(**WISHES)
def train(call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    note("enter", attempt=call.iteration, size=size, env=[int(os.environ[name]) for name in NAMES])
    sampler = GlobalSampler(1000, shuffle=False)
    if os.path.exists("kept"):
        sampler.load_state_dict(json.load(open("kept")))
    samples = iter(sampler)
    while sampler.consumed < 60:
        mine = next(samples)
        given = [None] * size
        dist.all_gather_object(given, mine)
        if rank == 0:
            with open("next", "w") as file:
                json.dump(sampler.state_dict(), file)
            os.replace("next", "kept")
            note("samples", numbers=given)
        dist.barrier()
        while call.iteration == 0 and sampler.consumed >= 12:
            dist.barrier()
            time.sleep(0.01)
            if not once_told():
                note("ready")
    dist.destroy_process_group()
told = []
def once_told():
    return told or told.append(1)
train()
note("returned")
"""


def job(wishes=""):
    return JOB.replace("**WISHES", wishes)


def living(job):
    events = job.events()
    gone = {e["child_pid"] for e in events if e["event"] == "ProcessEnded"}
    return [e for e in events if e["event"] == "ProcessStarted" and e["child_pid"] not in gone]


def kill_zygote(job):
    for event in living(job):
        if event["name"] == "zygote":
            with contextlib.suppress(ProcessLookupError):
                os.kill(event["child_pid"], signal.SIGKILL)


def strike(job, *ranks):
    """No process can be born for some seconds, and these ranks are lost."""
    notes = {n["rank"]: n["pid"] for n in job.wait_for("ready", 3)}
    kill_zygote(job)
    for rank in ranks:
        os.kill(notes[rank], signal.SIGKILL)


def sizes(ended):
    return [e["world_size"] for e in ended.events("GenerationStarted")]


def whole(ended, ranks):
    """Each sample was taken once, whatever the world's size; the ledger has a place for every second."""
    taken = [number for n in ended.of("samples") for number in n["numbers"]]
    assert sorted(taken) == list(range(len(taken)))
    assert len(taken) >= 60
    assert sorted(n["rank"] for n in ended.of("returned")) == list(range(ranks))
    ledger = account(read_run(ended.run_dir).records)
    assert ledger.errors == []
    return ledger


def test_a_spare_that_is_there_keeps_the_size(start):
    flags = ("--nproc-per-node", "3", "--spares", "1", "--min-world-size", "2", "--replacement-timeout", "0")
    running = start(job(), *flags)
    running.wait_for("ready", 3)
    deadline = time.monotonic() + 60
    while not any(e["name"].startswith("spare") for e in living(running)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    strike(running, 1)
    ended = running.ended(120)
    assert ended.code == 0, ended.err
    assert sizes(ended) == [3, 3]
    whole(ended, 3)


def test_without_one_the_world_shrinks_after_the_time_that_was_given(start):
    """Rank 1 is lost, rank 2 becomes rank 1: its environment, its data and its groups say so."""
    flags = ("--nproc-per-node", "3", "--spares", "0", "--min-world-size", "2", "--replacement-timeout", "0.5")
    running = start(job(), *flags)
    strike(running, 1)
    ended = running.ended(120)
    assert ended.code == 0, ended.err
    assert sizes(ended) == [3, 2]
    (before, after) = ([n for n in ended.of("enter") if n["attempt"] == attempt] for attempt in (0, 1))
    pids = {n["rank"]: n["pid"] for n in before}
    assert {n["rank"]: n["pid"] for n in after} == {0: pids[0], 1: pids[2]}
    assert sorted(n["env"] for n in after) == [[0, 2, 0, 2, 0, 2], [1, 2, 1, 2, 1, 2]]
    (fault,) = ended.events("FaultNoticed")
    (_, second) = ended.events("GenerationStarted")
    assert second["mono_s"] - fault["mono_s"] >= 0.5
    assert "no replacement came, 2 ranks go on" in ended.err
    (recovery,) = whole(ended, 2).recoveries
    assert recovery.took_over == "shrunk"


@pytest.mark.long
def test_the_world_waits_and_goes_on_when_the_replacement_is_there(start):
    """A new zygote takes seconds to come up; there is time."""
    flags = ("--nproc-per-node", "3", "--spares", "0", "--min-world-size", "1", "--replacement-timeout", "100")
    running = start(job(), *flags)
    strike(running, 1)
    ended = running.ended(150)
    assert ended.code == 0, ended.err
    assert sizes(ended) == [3, 3]
    whole(ended, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("least", "code"), [(2, 0), (3, 75)])
def test_nobody_is_waited_for_where_nothing_can_be_started_any_more(start, least, code):
    """Every zygote is killed: the time that was given would be ten minutes."""
    flags = ("--nproc-per-node", "3", "--spares", "0", "--replacement-timeout", "600")
    running = start(job(), *flags, *(("--min-world-size", "2") if least < 3 else ()))
    strike(running, 2)
    deadline = time.monotonic() + 120
    while running.process.poll() is None and time.monotonic() < deadline:
        if [e for e in running.events() if e["event"] == "GenerationStarted" and e["number"] == 1]:
            break
        kill_zygote(running)
        time.sleep(0.1)
    ended = running.ended(60)
    assert ended.code == code, ended.err
    assert "this node can start no more processes" in ended.err
    if code == 0:
        assert sizes(ended) == [3, 2]
        whole(ended, 2)
    else:
        assert "death of rank 2" in ended.err
        assert sizes(ended) == [3]


@pytest.mark.parametrize(
    "floor",
    ["flag", *(pytest.param(name, marks=pytest.mark.long) for name in ("min_world_size", "min_active_world_size"))],
)
def test_with_too_few_left_the_job_ends_with_its_story(start, floor):
    """What a RetryController wants at least, the agent does not go below."""
    wishes = "" if floor == "flag" else f"initialize=inprocess.initialize.RetryController({floor}=2)"
    least = "2" if floor == "flag" else "1"
    flags = ("--nproc-per-node", "3", "--spares", "0", "--min-world-size", least, "--replacement-timeout", "0.5")
    running = start(job(wishes), *flags)
    strike(running, 1, 2)
    ended = running.ended(120)
    assert ended.code == 75, ended.err
    (end,) = ended.events("RunEnded")
    assert (
        "fresh processes for 2 of 3 ranks and may not go on with fewer than 2; before it, death of rank"
        in end["reason"]
    )
    assert end["reason"] in ended.err
    assert sizes(ended) == [3]


KEPT = """
from torch.distributed.fsdp import fully_shard
from everstep.data import GlobalSampler
class Mine:
    counts = {}
    def __init__(self):
        self.at = 0
    def __iter__(self):
        while True:
            self.at += 1
            yield torch.tensor([self.at])
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]
class Stream:
    counts_whole_world = True
    def __init__(self, run):
        self.sampler = GlobalSampler(1000, shuffle=False, rank=run.rank, world_size=run.world_size)
    def __iter__(self):
        for sample in self.sampler:
            yield torch.tensor([sample])
    def state_dict(self):
        return self.sampler.state_dict()
    def load_state_dict(self, state):
        self.sampler.load_state_dict(state)
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 5)
    model = fully_shard(model) if SHARDED else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    loader = Stream(run) if OURS else Mine()
    for step, batch in run.steps(40, loader, model=model, optimizer=optimizer):
        model(batch.float()[:, None] / 1000).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        entry = next(iter(optimizer.state.values()))["momentum_buffer"]
        whole = entry.full_tensor() if SHARDED else entry
        note("step", step=step, size=run.world_size, sample=int(batch), momentum=whole.flatten().tolist())
        while step == 25 and run.world_size == 3 and not os.path.exists("again"):
            dist.barrier()
            if not told:
                told.append(note("ready"))
            time.sleep(0.01)
told = []
train()
note("returned")
"""


def kept(*, sharded, ours):
    return f"SHARDED, OURS = {sharded}, {ours}\n{KEPT}"


FLAGS = ("--nproc-per-node", "3", "--spares", "0")
SHRINKING = ("--min-world-size", "1", "--replacement-timeout", "0")


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_those_who_are_left_go_on_from_the_snapshots_of_all(start, sharded):
    """No disk: what three ranks had in memory is taken up by two. No sample is read twice or left out."""
    first = start(kept(sharded=sharded, ours=True), *FLAGS, *SHRINKING)
    strike(first, 1)
    ended = first.ended(120)
    assert ended.code == 0, ended.err
    assert sizes(ended) == [3, 2]
    (why,) = {r.event.why for r in read_run(ended.run_dir).records if isinstance(r.event, Restored)}
    told = re.fullmatch(
        r"step (2\d) from memory: the newest that all 3 ranks hold, of lineage 0\.0(; step \d+ is not whole)?; "
        r"2 ranks take it up", why,
    )  # fmt: skip
    assert told, why
    began, rows = int(told[1]), [n for n in ended.of("step") if n["size"] == 3 and n["step"] <= int(told[1])]
    after = [n for n in ended.of("step") if n["size"] == 2]
    assert sorted({n["step"] for n in after}) == list(range(began + 1, 41))
    samples = [n["sample"] for n in [*rows, *after]]
    assert sorted(samples) == list(range(3 * began + 2 * (40 - began)))
    momenta, expected = {n["step"]: n["momentum"] for n in [*rows, *after]}, 0.0
    for step in range(1, 41):
        batch = [n["sample"] / 1000 for n in [*rows, *after] if n["step"] == step]
        expected = 0.9 * expected + sum(batch) / len(batch)
        assert momenta[step] == pytest.approx([expected] * 5, rel=1e-5), "the optimizer's state came along"


@pytest.mark.long
def test_a_sampler_that_counts_for_its_rank_is_not_taken_along_and_a_new_start_with_all_goes_on(start, tmp_path):
    flags = (*FLAGS, "--checkpoint-dir", str(tmp_path / "kept"))
    script = kept(sharded=False, ours=False)
    first = start(script, *flags, *SHRINKING, "--checkpoint-interval", "10")
    strike(first, 1)
    ended = first.ended(120)
    assert ended.code == 75, ended.err
    assert "2 ranks are left, and the state of step 2" in ended.err
    assert "loader: the position of Mine in the data counts for each rank alone" in ended.err
    assert {n["size"] for n in ended.of("step")} == {3}, "nobody began from somewhere else"
    (first.folder / "again").touch()
    again = start(script, *flags, again=first).ended(120)
    assert again.code == 0, again.err
    steps = [n["step"] for n in again.of("step")][len(ended.of("step")) :]
    assert min(steps) in (11, 21)
    assert max(steps) == 40
