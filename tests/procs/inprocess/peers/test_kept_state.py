"""State without an agent: the watchers keep it, and a fault that leaves all processes alive costs at most a step."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import everstep
from everstep.training import Positioned

pytestmark = [pytest.mark.procs, pytest.mark.timeout(150)]
RANKS, STEPS, FAULT = 3, 10, 6


def job(rank, _, *, front, env, how, folder, more):
    """One rank of a job; returns [generation, step, loss] of all that it did."""
    os.environ |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(front)} | env | more
    said = os.open(f"{folder}/{how}-{rank}.err", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(said, 2)
    done = []

    @everstep.resilient
    def train(run):
        torch.manual_seed(run.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        batches = [torch.arange(8.0) * (k + 1) / 40 + run.rank for k in range(STEPS)]
        loader = batches if how == "no state" else Positioned(batches)
        for step, batch in run.steps(STEPS, loader, model=model, optimizer=optimizer, schedule=schedule):
            loss = model(batch).square().mean()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            done.append([run.generation, step, loss.item()])
            if step == FAULT and run.generation == 0 and run.rank == 1 % run.world_size:
                fail(how)
        return done

    return train()


def fail(how):
    if how == "sleep":
        time.sleep(1000)
    if how != "well":
        raise ValueError("planned")


def losses_of(told):
    """{(rank, step): [(generation, loss)]}"""
    found = {}
    for rank, rows in enumerate(told):
        for generation, step, loss in rows:
            found.setdefault((rank, step), []).append((generation, loss))
    return found


@pytest.fixture
def train(bare, tmp_path):
    """Runs a job; returns its losses and what was said."""

    def run(how, ranks=RANKS, **more):
        told = losses_of(bare.run(job, ranks, 90.0, how=how, folder=str(tmp_path), more=more))
        return told, "".join(p.read_text() for p in sorted(tmp_path.glob(f"{how}-*.err")))

    return run


@pytest.mark.parametrize("how", ["raise", "sleep"])
def test_every_rank_goes_on_from_memory_and_the_losses_are_the_twins(train, how):
    twin, _ = train("well")
    losses, err = train(how)
    assert losses.keys() == twin.keys() == {(rank, step) for rank in range(RANKS) for step in range(1, STEPS + 1)}
    assert {key: {loss for _, loss in told} for key, told in losses.items()} == {
        key: {loss} for key, [(_, loss)] in twin.items()
    }
    again = {step for (_, step), told in losses.items() if len(told) > 1}
    assert again <= {FAULT}, f"steps done twice: {sorted(again)}"
    assert "generation 1 goes on with step 6: step 5 from memory" in err


def test_a_world_of_one_keeps_its_state_too(train):
    losses, _ = train("raise", ranks=1)
    assert sorted(step for _, step in losses) == list(range(1, STEPS + 1))
    assert [step for (_, step), told in losses.items() if len(told) > 1] == [FAULT]
    assert len({loss for _, loss in losses[0, FAULT]}) == 1  # the same step, to the bit


def test_what_has_no_state_is_said_and_trains_from_the_beginning(train):
    losses, err = train("no state")
    assert [generation for generation, _ in losses[0, 1]] == [0, 1]
    assert err.count("no snapshots are taken, a fault begins at step 1 again: the loader, a list") == RANKS
    assert "generation 1 goes on with step 1: from the beginning" in err


def test_too_little_memory_is_said_and_the_job_trains(train):
    losses, err = train("raise", EVERSTEP_SNAPSHOT_MEMORY="4KiB")
    assert "Raise --snapshot-memory (where no agent runs, EVERSTEP_SNAPSHOT_MEMORY)" in err
    assert [generation for generation, _ in losses[2, 1]] == [0, 1]
