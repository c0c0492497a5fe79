"""A job that is asked to end: the step ends on all ranks, its state is durable, the next start goes on from it."""

import os
import random
import re
import signal
import time

import pytest
import torch

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

TRAIN = """
import random
MODE, AT = os.environ.get("MODE", ""), int(os.environ.get("AT", "20"))
STEPS, PACE = int(os.environ.get("STEPS", "100000")), float(os.environ.get("PACE", "0.02"))
@everstep.resilient
def train(run):
    torch.manual_seed(run.rank); random.seed(run.rank)
    note("enter", generation=run.generation)
    weight = torch.nn.Linear(2, 2)
    try:
        for step in run.steps(STEPS, weight=weight):
            with torch.no_grad(): weight.weight += torch.rand(2, 2)
            if MODE == "long step" and step == AT:
                note("inside"); time.sleep(1000 if run.rank == 1 else 0)
            if MODE == "killed" and step == AT and run.rank == 1:
                note("inside"); time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)
            if MODE == "swallowed" and step == AT: note("inside"); time.sleep(0.5)
            dist.all_reduce(torch.ones(1))
            note("step", step=step, generation=run.generation, drawn=random.random(),
                 weight=weight.weight.flatten().tolist())
            time.sleep(PACE * (1 + run.rank))
    except SystemExit as end:
        note("left", step=end.step)
        if MODE == "swallowed": return
        raise
    note("loop over")
    if MODE == "after": note("inside"); time.sleep(1000)
    if MODE == "late": note("inside"); time.sleep(0.5)
train()
note("script over")
"""


def drawn(rank, steps):
    """What a run without an end would have in its generators and weights after each step."""
    torch.manual_seed(rank)
    random.seed(rank)
    weight, told = torch.nn.Linear(2, 2).weight.detach(), {}
    for step in range(1, steps + 1):
        weight += torch.rand(2, 2)
        told[step] = (random.random(), weight.flatten().tolist())
    return told


def test_a_signal_ends_the_step_saves_it_and_the_next_start_goes_on_bit_for_bit(start, tmp_path):
    flags = ("--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "100000")
    flags = (*flags, "--spares", "0")
    job = start(TRAIN, *flags)
    job.wait_for("step", 40)
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(60)
    assert ended.code == 143, ended.err
    (last,) = {note["step"] for note in ended.of("left")}
    assert [max(n["step"] for n in ended.of("step") if n["rank"] == rank) for rank in range(2)] == [last, last]
    assert f"ended by SIGTERM from outside after step {last}. The checkpoint of step {last} is durable" in ended.err
    assert not ended.of("loop over"), "what follows the loop would take the training for done"
    assert not ended.of("script over")
    assert os.listdir(tmp_path / "ckpt").count(f"step-{last}") == 1
    over = start(TRAIN, *flags, again=job, env={"STEPS": str(last + 5)}).ended(60)
    assert over.code == 0, over.err
    for rank in range(2):
        right = drawn(rank, last + 5)
        steps = {n["step"]: (n["drawn"], n["weight"]) for n in over.of("step") if n["rank"] == rank}
        assert steps == right, "each step once, as if nobody had asked"
    assert len(over.of("step")) == 2 * (last + 5)


CASES = [
    # a rank that never comes to the end of its step: the step before it is saved from memory
    ("long step", signal.SIGTERM, ("--grace", "6", "--soft-timeout", "100"), 143, "a step did not end within 3 s"),
    ("long step", signal.SIGINT, ("--grace", "6", "--soft-timeout", "100"), 130, "a step did not end within 3 s"),
    ("killed", signal.SIGTERM, (), 143, "a death came before all ranks had ended their step"),
    ("killed", signal.SIGHUP, ("--max-restarts", "0"), 1, ""),
    ("after", signal.SIGTERM, ("--grace", "6"), 143, "a step did not end within 3 s"),
    ("late", signal.SIGTERM, (), 0, ""),
    ("swallowed", signal.SIGTERM, (), 143, "after step 20. "),
]


@pytest.mark.long
@pytest.mark.parametrize(("mode", "number", "flags", "code", "words"), CASES)
def test_whatever_a_rank_does_the_end_comes_in_time_and_what_was_done_is_durable(
    start, tmp_path, mode, number, flags, code, words
):
    base = ("--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "100000")
    job = start(TRAIN, *base, *flags, env={"MODE": mode, "STEPS": "20" if mode in ("after", "late") else "100000"})
    job.wait_for("inside")
    os.kill(job.process.pid, number)
    ended = job.ended(60)
    assert ended.code == code, ended.err
    assert words in ended.err
    last = max(n["step"] for n in ended.of("step"))
    assert last == (19 if mode in ("long step", "killed") else 20)
    assert os.listdir(tmp_path / "ckpt").count(f"step-{last}") == 1
    if code > 128:
        assert f"The checkpoint of step {last} is durable: the next start goes on from there" in ended.err
    job.gone_within(1.0)


@pytest.mark.long
def test_a_second_signal_waits_for_nothing_and_the_words_say_what_is_lost(start, tmp_path):
    flags = ("--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "10")
    job = start(TRAIN, *flags, "--grace", "1000", "--soft-timeout", "100", env={"MODE": "long step", "AT": "25"})
    job.wait_for("inside")
    os.kill(job.process.pid, signal.SIGTERM)
    os.kill(job.process.pid, signal.SIGTERM)  # the same one, by two ways
    time.sleep(1.5)
    assert job.process.poll() is None
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(60)
    assert ended.code == 1, ended.err
    assert "SIGTERM again: everything is killed" in ended.err
    assert "Step 24 was done, and the newest durable checkpoint is of step 20" in ended.err


@pytest.mark.long
def test_a_signal_while_processes_are_born_ends_the_job_before_it_trains(start):
    job = start(TRAIN, "--nproc-per-node", "2")
    while not any(event["event"] == "ProcessStarted" and event["name"] == "store" for event in job.events()):
        time.sleep(0.01)
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(60)
    assert ended.code == 143, ended.err
    assert len({note["step"] for note in ended.of("step")}) <= 2, "it may have begun meanwhile"


@pytest.mark.long
def test_sigquit_ends_it_without_a_last_save(start, tmp_path):
    flags = ("--nproc-per-node", "2", "--checkpoint-dir", str(tmp_path / "ckpt"), "--checkpoint-interval", "100000")
    job = start(TRAIN, *flags)
    job.wait_for("step", 10)
    os.kill(job.process.pid, signal.SIGQUIT)
    ended = job.ended(60)
    assert ended.code == 131, ended.err
    assert not [name for name in os.listdir(tmp_path / "ckpt") if name.startswith("step-")]


@pytest.mark.long
def test_without_a_directory_the_words_say_that_nothing_was_written(start):
    job = start(TRAIN, "--nproc-per-node", "2")
    job.wait_for("step", 10)
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(60)
    assert ended.code == 143
    assert re.search(r"Step \d+ was done, and nothing was written: --checkpoint-dir is not given", ended.err)


@pytest.mark.long
@pytest.mark.parametrize("text", [
    "note('up')\ntime.sleep(1000)\n",
    "@everstep.inprocess.Wrapper()\ndef f():\n    note('up')\n    time.sleep(1000)\nf()\n",
    "signal.signal(signal.SIGTERM, lambda *_: (note('heard'), sys.exit(5)))\nnote('up')\ntime.sleep(1000)\n",
    "@everstep.resilient\ndef f(run):\n    signal.signal(signal.SIGTERM, lambda *_: (note('heard'), sys.exit(5)))\n"
    "    note('up')\n    time.sleep(1000)\nf()\n",
])  # fmt: skip
def test_a_script_whose_steps_are_not_known_gets_the_signal_itself(start, text):
    job = start("import everstep.inprocess\n" + text, "--nproc-per-node", "2", "--grace", "8")
    job.wait_for("up", 2)
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(60)
    assert ended.code == 143, ended.err
    assert len(ended.of("heard")) == 2 * ("heard" in text)
    assert "ended by SIGTERM from outside" in ended.err
    assert "checkpoint" not in ended.err
