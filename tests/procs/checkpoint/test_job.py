"""The disk tier under `everstep run`: restarts of the whole job, killed writers and agents, disks that go away."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from everstep.checkpoint import catalog
from everstep.checkpoint.load import open_checkpoint
from everstep.clock import SYSTEM

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]
SCRIPT = Path(__file__).with_name("job_script.py")
LIMIT_S = 90


class Job:
    """One `everstep run`, of two ranks where nothing else is said."""

    def __init__(
        self, tmp_path, name, steps, *, pause_s=0.0, interval=10, directory="ckpt", ranks=2, keep=2, spares=0, more=(),
        environment=None,
    ):  # fmt: skip
        self.run, self.losses = tmp_path / name, tmp_path / f"{name}.losses"
        flags = ["--nproc-per-node", str(ranks), "--spares", str(spares), "--run-dir", str(self.run), *more]
        where = directory if "://" in directory else str(tmp_path / directory)
        flags += ["--checkpoint-keep", str(keep)]
        flags += ["--checkpoint-dir", where, "--checkpoint-interval", str(interval)]
        command = [sys.executable, "-m", "everstep.cli", "run", *flags, str(SCRIPT), str(steps), str(pause_s)]
        self.process = subprocess.Popen(
            [*command, str(self.losses)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    def end(self):
        """Wait; return exit code and what was printed."""
        told, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, told

    def events(self, kind):
        """Events of that kind so far."""
        lines = [line for path in self.run.glob("events/*.jsonl") for line in path.read_text().splitlines() if line]
        found = [json.loads(line) for line in lines if line.endswith("}}")]
        return [one["is"] for one in found if one["event"] == kind]

    def tiers(self, what):
        return [e["step"] for e in self.events("TierEvent") if e["tier"] == "disk" and e["what"] == what]

    def until(self, ready):
        """Wait until something is so."""
        deadline = SYSTEM.now() + LIMIT_S
        while not ready():
            assert self.process.poll() is None, self.process.stdout.read()
            assert SYSTEM.now() < deadline, "it does not come to that"
            SYSTEM.sleep(0.02)

    def writers(self):
        """Process ids of the writers, by name, newest last."""
        return {e["name"]: e["child_pid"] for e in self.events("ProcessStarted") if e["name"].startswith("writer")}

    def losses_by_step(self):
        rows = [line.split() for line in self.losses.read_text().splitlines()]
        return {(int(rank), int(step)): loss for rank, step, loss, _ in rows}

    def kill(self):
        """The agent is gone; so are all of its processes within two seconds."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.communicate()
        _, alive = psutil.wait_procs(family, timeout=5.0)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def steps_in(path):
    return [found.step for found in catalog.scan(str(path)) if found.complete]


TOTAL, INTERVAL = 60, 5


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """A job whose agent was killed on its way to step 60, and its twin that nobody ended: a folder with both."""
    folder = tmp_path_factory.mktemp("cut_off")
    twin = Job(folder, "twin", TOTAL, interval=TOTAL, directory="of-twin")
    assert twin.end()[0] == 0
    job = Job(folder, "killed", TOTAL, pause_s=0.05, interval=INTERVAL, keep=3)
    job.until(lambda: len(job.tiers("committed")) >= 4)
    job.kill()
    return folder, twin


@pytest.fixture
def again(cut_off, tmp_path):
    """What the killed job left on disk, to do harm to, and the way to begin it again."""
    folder, twin = cut_off
    shutil.copytree(folder / "ckpt", tmp_path / "ckpt", symlinks=True)
    return tmp_path / "ckpt", twin, lambda **changes: Job(tmp_path, "again", TOTAL, interval=INTERVAL, **changes)


def assert_it_ends_as(twin, job, began_after, directory):
    """Every loss since then is the twin's bit for bit, and so is all that the last checkpoint holds."""
    expected = {key: loss for key, loss in twin.losses_by_step().items() if key[1] > began_after}
    assert job.losses_by_step() == expected
    for rank in range(2):
        with (
            open_checkpoint(str(directory / f"step-{TOTAL}"), rank, 2) as ours,
            open_checkpoint(str(directory.parent / "twin"), rank, 2) as theirs,
        ):
            assert ours.layout.to_json() == theirs.layout.to_json()
            assert {f.path: ours.read(f.path) for f in ours.layout.leaves()} == {
                f.path: theirs.read(f.path) for f in theirs.layout.leaves()
            }


def damage(directory, step, file="__1_0.distcp"):
    """One bit of the largest file."""
    path = directory / f"step-{step}" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def test_a_job_begun_again_from_disk_is_the_job_that_was_never_ended(cut_off, tmp_path):
    first = Job(tmp_path, "first", 17)
    assert first.end()[0] == 0
    assert steps_in(tmp_path / "ckpt")[0] == 17, "the last step is always saved; a fast job may pass multiples by"
    second = Job(tmp_path, "second", 34)
    code, told = second.end()
    assert code == 0
    assert told.count("continuing from ") == 1, "one line a job, not one a rank"
    assert f"everstep: continuing from {tmp_path}/ckpt/step-17: 17 of 34 steps are done\n" in told
    assert [(e["step"], e["tier"]) for e in second.events("Restored")] == [(17, "disk")] * 2
    together = first.losses_by_step() | second.losses_by_step()
    assert together == {key: loss for key, loss in cut_off[1].losses_by_step().items() if key[1] <= 34}
    assert min(step for _, step in second.losses_by_step()) == 18
    assert steps_in(tmp_path / "ckpt")[0] == 34
    third = Job(tmp_path, "third", 34)
    code, told = third.end()
    assert code == 0
    assert f"{tmp_path}/ckpt/step-34 is the whole job (34 steps done, 34 asked for): nothing is left to train" in told
    assert not [name for name in os.listdir(tmp_path / "ckpt") if not name.startswith("step-")]


def test_killed_writers_are_replaced_and_the_saves_go_on(tmp_path):
    job = Job(tmp_path, "run", 150, pause_s=0.02)
    job.until(lambda: job.tiers("committed"))
    before = job.writers()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    code, told = job.end()
    assert "another takes its place" in told
    after = job.writers()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert steps_in(tmp_path / "ckpt")[0] == 150
    assert (code == 0) == (job.tiers("failed") == []), told
    assert len({line.split()[3] for line in job.losses.read_text().splitlines()}) == 2, "the ranks never stopped"


@pytest.mark.long
def test_killed_workers_neither_stop_nor_spoil_what_is_being_saved(tmp_path):
    """A fault ends the intents that not all have staged, and no other; what is committed is of one attempt."""
    job = Job(tmp_path, "run", 200, pause_s=0.01, interval=3, spares=1)
    for hits in (1, 2, 3):
        job.until(lambda hits=hits: len(job.tiers("committed")) > 2 * hits)
        victim = [line.split() for line in job.losses.read_text().splitlines() if line.startswith("1 ")][-1]
        os.kill(int(victim[3]), signal.SIGKILL)
        job.until(lambda hits=hits: len(job.events("GenerationStarted")) > hits)
    code, told = job.end()
    assert code == 0, told
    assert job.tiers("failed") == []
    assert steps_in(tmp_path / "ckpt")[0] == 200
    assert not [wound for found in catalog.scan(str(tmp_path / "ckpt")) for wound in catalog.verify(found)]
    lost = [e["restore_step"] for e in job.events("GenerationStarted") if e["number"]]
    assert len(lost) == 3


def test_a_directory_that_goes_away_fails_saves_by_name_and_in_the_exit_status(tmp_path):
    """CS-37: nobody but the agent asks; the job trains to its end, and its exit says what was not saved."""
    job = Job(tmp_path, "run", 60, pause_s=0.02)
    job.until(lambda: job.tiers("committed"))
    shutil.rmtree(tmp_path / "ckpt")
    (tmp_path / "ckpt").touch()
    code, told = job.end()
    assert code == 1
    assert "the checkpoint of step 60 was not saved: rank" in told
    assert "Not a directory" in told
    assert max(step for _, step in job.losses_by_step()) == 60
    lost = job.tiers("failed")
    told_of = {step: told.count(f"the checkpoint of step {step} was not saved") for step in lost}
    assert told_of == {step: lost.count(step) + (step == lost[-1]) for step in lost}, (
        "when it comes, the last at the end"
    )


@pytest.mark.long
def test_a_state_of_another_shape_is_refused_with_the_way_out(tmp_path):
    script = tmp_path / "shape.py"
    script.write_text(
        "import sys, torch, everstep\n"
        "@everstep.resilient\n"
        "def train(run):\n"
        "    for _ in run.steps(3, model=torch.nn.Linear(int(sys.argv[1]), 2)): pass\n"
        "train()\n"
    )
    command = [sys.executable, "-m", "everstep.cli", "run", "--spares", "0", "--checkpoint-dir", str(tmp_path / "ckpt")]
    ends = [
        subprocess.run([*command, str(script), width], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        for width in ("3", "4")
    ]
    assert ends[0].returncode == 0, ends[0].stderr
    assert ends[1].returncode != 0
    assert "rank 0: the saved state does not fit" in ends[1].stderr
    assert "rank 0: rank 0" not in ends[1].stderr
    assert "another --checkpoint-dir" in ends[1].stderr


@pytest.mark.long
def test_after_the_agents_death_the_next_job_sweeps_and_goes_on(tmp_path):
    job = Job(tmp_path, "run", 5000, pause_s=0.005, interval=2)
    job.until(lambda: len(job.tiers("committed")) > 3)
    job.kill()
    last = max(job.tiers("committed"))
    newest = steps_in(tmp_path / "ckpt")[0]
    assert newest >= last
    again = Job(tmp_path, "again", newest + 20, interval=10)
    assert again.end()[0] == 0
    assert {e["step"] for e in again.events("Restored")} == {newest}
    assert steps_in(tmp_path / "ckpt")[0] == newest + 20
    assert not [name for name in os.listdir(tmp_path / "ckpt") if not name.startswith("step-")]


def test_a_job_whose_agent_was_killed_goes_on_to_the_bit(cut_off, again):
    directory, twin, begin = again
    shutil.copytree(cut_off[0] / "of-twin" / f"step-{TOTAL}", directory.parent / "twin")
    newest = steps_in(directory)[0]
    job = begin()
    code, told = job.end()
    assert code == 0, told
    assert [(e["step"], e["tier"]) for e in job.events("Restored")] == [(newest, "disk")] * 2
    assert_it_ends_as(twin, job, newest, directory)
    assert not [name for name in os.listdir(directory) if not name.startswith("step-")], "what the dead left is swept"


def test_a_damaged_newest_is_named_and_the_next_best_goes_on_to_the_bit(cut_off, again):
    """CL-01, by a bit that only a checksum sees."""
    directory, twin, begin = again
    shutil.copytree(cut_off[0] / "of-twin" / f"step-{TOTAL}", directory.parent / "twin")
    newest, next_best, *_ = steps_in(directory)
    wounded = damage(directory, newest)
    job = begin(keep=100)
    code, told = job.end()
    assert code == 0, told
    assert f"damaged checkpoint {wounded.parent}: {wounded.name}" in told
    assert f"step {next_best} is taken" in told
    assert [(e["step"], e["tier"]) for e in job.events("Restored")] == [(next_best, "disk")] * 2
    assert_it_ends_as(twin, job, next_best, directory)


def everything(directory):
    """All files of every whole checkpoint. (What was being removed at the kill goes at the next start.)"""
    return {
        path: path.read_bytes()
        for found in catalog.scan(str(directory))
        if found.complete
        for path in Path(found.path).iterdir()
    }


def test_all_damaged_is_one_clear_error_and_nothing_is_deleted(again):
    directory, _, begin = again
    for step in steps_in(directory):
        damage(directory, step)
    before = everything(directory)
    job = begin()
    code, told = job.end()
    assert code == 78
    assert f"no checkpoint in {directory} is whole" in told
    for step in steps_in(directory):
        assert f"step {step}: __1_0.distcp" in told
    assert "Nothing was deleted" in told
    assert "Traceback" not in told
    assert everything(directory) == before
    assert not job.losses.exists()


def test_a_sampler_that_counts_for_its_rank_is_not_taken_to_another_world(again):
    directory, _, begin = again
    before = everything(directory)
    job = begin(ranks=1)
    code, told = job.end()
    assert code == 78
    assert "loader: the position of RandomSampler in the data counts for each rank alone" in told
    assert "everstep.data.GlobalSampler" in told
    assert everything(directory) == before
    assert not job.losses.exists()


WORLDS = """
import os, sys, torch
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
import everstep
from everstep.data import GlobalSampler
STEPS, LOSSES, SHARDED, WORKERS = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fsdp", int(sys.argv[4])
@everstep.resilient
def train(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 7), torch.nn.Linear(7, 3))
    model = fully_shard(model) if SHARDED else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    ids = torch.arange(50.0)[:, None]
    loader = StatefulDataLoader(ids, 2, sampler=GlobalSampler(50, seed=3), num_workers=WORKERS)
    for step, batch in run.steps(STEPS, loader, model=model, optimizer=optimizer, scheduler=scheduler):
        model(batch / 50).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with open(LOSSES, "a") as file:
            file.write(f"{run.rank} {step} {[int(x) for x in batch]} {scheduler.last_epoch}\\n")
train()
"""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_one_directory_goes_on_in_worlds_of_three_two_and_four_and_no_sample_is_lost(tmp_path, workers):
    """FSDP2 on 3 ranks, DDP on 2, FSDP2 on 4, with a scheduler and a loader: each sample once an epoch."""
    script, losses = tmp_path / "worlds.py", tmp_path / "losses"
    script.write_text(WORLDS)
    seen, begun = [], 0
    for ranks, kind, steps in ((3, "fsdp", 5), (2, "ddp", 9), (4, "fsdp", 16)):
        flags = ["--nproc-per-node", str(ranks), "--spares", "0", "--run-dir", str(tmp_path / f"run-{ranks}")]
        flags += ["--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-interval", "100"]
        command = [sys.executable, "-m", "everstep.cli", "run", *flags, str(script), str(steps), str(losses), kind]
        done = subprocess.run([*command, str(workers)], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        rows = [line.split(" ", 2) for line in losses.read_text().splitlines()]
        losses.unlink()
        assert sorted({int(step) for _, step, _ in rows}) == list(range(begun + 1, steps + 1))
        for _, step, rest in rows:
            batch, _, last = rest.rpartition(" ")
            assert int(last) == int(step), "the scheduler goes on"
            seen.append(json.loads(batch))
        if begun:
            assert f"taken up by {ranks})" in done.stderr
        begun = steps
    flat = [sample for batch in seen for sample in batch]
    assert len(flat) == 2 * (5 * 3 + 4 * 2 + 7 * 4)
    assert sorted(flat[:50]) != flat[:50]
    counts = {sample: flat.count(sample) for sample in range(50)}
    assert sum(counts.values()) == 102
    assert set(counts.values()) <= {2, 3}
    assert sum(count == 3 for count in counts.values()) == 2, "two epochs, and two samples of the third"


def test_the_nodes_own_directory_serves_the_restart_and_its_loss_costs_a_notice(cut_off, tmp_path):
    """Two tiers of one job: the newest, the nearest first; then the local one is gone, and the shared one serves."""
    local = tmp_path / "local"
    both = ["--checkpoint-local-dir", str(local), "--checkpoint-local-interval", "4"]
    first = Job(tmp_path, "first", TOTAL, pause_s=0.05, interval=20, more=both)
    first.until(lambda: any(e["tier"] == "local" and e["step"] >= 24 for e in committed(first)))
    first.kill()
    newest = max(steps_in(local))
    assert newest > max(steps_in(tmp_path / "ckpt"))
    second = Job(tmp_path, "second", newest + 1, interval=20, more=both)
    code, told = second.end()
    assert code == 0, told
    assert {(e["tier"], e["step"]) for e in second.events("Restored")} == {("local", newest)}
    assert f"continuing from {local}/step-{newest}" in told
    shutil.rmtree(local)
    local.write_text("no directory any more")
    third = Job(tmp_path, "third", TOTAL, interval=20, more=both)
    code, told = third.end()
    assert code == 0, told
    assert {(e["tier"], e["step"]) for e in third.events("Restored")} == {("disk", newest + 1)}
    assert "nothing is read from or written to the local tier" in told
    expected = cut_off[1].losses_by_step()
    assert second.losses_by_step() == {key: loss for key, loss in expected.items() if key[1] == newest + 1}
    assert third.losses_by_step() == {key: loss for key, loss in expected.items() if key[1] > newest + 1}


def committed(job):
    return [e for e in job.events("TierEvent") if e["what"] == "committed"]
