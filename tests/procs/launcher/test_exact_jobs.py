"""Whole jobs that must end to the bit where the bits are easily lost: three ranks and more, and a start that fails."""

import json

import pytest

from everstep import cli

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]

DDP = """
from torch import nn
die = lambda: os.kill(os.getpid(), 9)
FAULTS = {3: (1, lambda: 1 / 0), 7: (WORLD - 1, die), 10: (0, die)}
@everstep.resilient
def train(run):
    torch.manual_seed(7)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(61, 61), nn.Dropout(0.1), nn.Tanh())])
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.03, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(run.rank)
    for step in run.steps(14, model=model, optimizer=optimizer):
        loss = model(torch.randn(16, 61)).square().mean()
        loss.backward()
        rank, hurt = FAULTS.get(step, (None, None))
        if sys.argv[1] == "hurt" and rank == run.rank and not os.path.exists(f"fired-{step}"):
            open(f"fired-{step}", "w").close()
            hurt()
        optimizer.step()
        optimizer.zero_grad()
        note("step", step=step, loss=loss.item().hex())
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    note("end", weights=__import__("hashlib").sha256(weights).hexdigest())
train()
"""


@pytest.mark.long
@pytest.mark.parametrize("world", [4, 3])
def test_ddp_with_one_layout_of_buckets_is_exact_through_faults(start, world):
    """E22 through the whole ladder: an exception, and two ranks killed inside the step, rank 0 among them."""
    text = DDP.replace("WORLD", str(world))
    told = {}
    for kind in ("spared", "hurt"):
        ended = start(text, "--nproc-per-node", str(world), args=(kind,)).ended(120)
        assert ended.code == 0, ended.err
        losses: dict[tuple[int, int], set[str]] = {}
        for n in ended.of("step"):
            losses.setdefault((n["rank"], n["step"]), set()).add(n["loss"])
        assert set(losses) == {(rank, step) for rank in range(world) for step in range(1, 15)}
        told[kind] = losses, {n["weights"] for n in ended.of("end")}
        assert {e["number"] for e in ended.events("FaultNoticed")} == (set() if kind == "spared" else {0, 1, 2})
        assert len(told[kind][1]) == 1
    assert told["hurt"] == told["spared"]


START = """
if os.environ["RANK"] == "1" and not os.path.exists("fired"):
    open("fired", "w").close()
    while not os.path.exists("waits"):
        time.sleep(0.01)
    time.sleep(0.3)  # rank 0 is on its way into init_process_group, and will wait there
    note("dies")
    os.kill(os.getpid(), 9)
if os.environ["RANK"] == "0":
    open("waits", "w").close()
@everstep.resilient
def train(run):
    note("enter", generation=run.generation)
    x = torch.ones(1)
    dist.all_reduce(x)
    note("sum", value=x.item(), groups=dist.distributed_c10d._world.group_count)
train()
"""


def test_a_rank_that_waits_in_init_process_group_meets_a_fresh_spare(start):
    """E10 and E11 in a whole job: a rank dies before its call, its peer gets out of the wait, and they meet."""
    ended = start(START, "--nproc-per-node", "2").ended()
    assert ended.code == 0, ended.err
    (dies,) = ended.of("dies")
    assert {n["rank"]: n["value"] for n in ended.of("sum")} == {0: 2.0, 1: 2.0}
    assert len({n["groups"] for n in ended.of("sum")}) == 1
    assert dies["pid"] not in {n["pid"] for n in ended.of("sum")}
    assert "death" in {e["kind"] for e in ended.events("FaultNoticed") if e["number"] == 0}
    assert max(n["at"] for n in ended.of("enter")) - dies["at"] < 5


THREADS = """
@everstep.resilient
def train(run):
    model = torch.nn.Linear(4, 4)
    torch.set_num_threads(1 if run.generation < 2 or run.rank == 0 else 2)
    for step in run.steps(6, model=model):
        dist.all_reduce(torch.ones(1))
        if step in (2, 4) and run.rank == 1 and run.generation == step // 2 - 1:
            raise RuntimeError("again")
train()
"""


def test_a_rank_that_goes_on_with_other_threads_is_told_of_at_once_and_in_the_report(start, capsys):
    """B4: what the bits depend on is compared whenever a loop begins; a restart that changes nothing says nothing."""
    ended = start(THREADS, "--nproc-per-node", "2").ended(120)
    assert ended.code == 0, ended.err
    said = [e["text"] for e in ended.events("Notice") if "comparable" in e["text"]]
    assert len(said) == 1
    assert "rank 1: threads 2, and 1 when the run began" in said[0]
    assert cli.main(["report", str(ended.run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ledger"]["not_comparable"] == ["rank 1: threads 2, and 1 when the run began"]
