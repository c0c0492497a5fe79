"""Every recoverable fault against its fault-free twin, to the bit: losses, samples, rates, and the state at the end.

The whole matrix is the long tier's; the normal tier runs a sample of it. With ROWS in the environment each cell writes
a line there, from which `scripts/exactness.py` makes docs/results/exactness.md.
"""

import json
import os
import random
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("exact_job.py").read_text()
CLASSES = (
    "exception", "hang in sleep", "hang in C", "SIGKILL", "SIGKILL of rank 0", "SIGSTOP", "held GIL",
    "SIGKILL during a save",
)  # fmt: skip
STEPS = 16
LIMITS = ("--soft-timeout", "3", "--first-timeout", "60", "--hard-timeout", "8")


def run(start, parallel: str, world: int, plan: list, steps: int = STEPS) -> dict:
    """Run one job; return what it computed, by rank and step."""
    env = {"PARALLEL": parallel, "STEPS": str(steps), "PLAN": json.dumps(plan)}
    flags = ("--nproc-per-node", str(world), "--spares", "1", *LIMITS)
    saves = ("--checkpoint-dir", "saved", "--checkpoint-interval", "2")
    ended = start(JOB, *flags, *saves, env=env).ended(300)
    assert ended.code == 0, ended.err
    told: dict[tuple[int, int], set] = {}
    for n in ended.of("step"):
        told.setdefault((n["rank"], n["step"]), set()).add((n["loss"], tuple(n["rows"]), n["lr"]))
    assert set(told) == {(rank, step) for rank in range(world) for step in range(1, steps + 1)}
    assert all(len(values) == 1 for values in told.values()), "a step that was done again came to something else"
    assert sorted(n["kind"] for n in ended.of("fault")) == sorted(kind for kind, _, _ in plan)  # each struck, once
    noticed = len(ended.events("FaultNoticed"))  # two that strike together are one; a busy machine may look like a hang
    assert bool(noticed) == bool(plan)
    redone = len(ended.of("step")) - len(told)
    assert redone <= noticed * world, "more than a step was lost by a fault"
    return {"told": told, "end": {n["rank"]: n["state"] for n in ended.of("end")}, "redone": redone}


def planned(parallel: str, world: int, kinds, apart: int = 4) -> list:
    """The faults of a job, each on a rank and at a step that the cell's name decides."""
    rng = random.Random(f"{parallel} {world} {'+'.join(kinds)}")
    ranks = {kind: 0 if kind == "SIGKILL of rank 0" else rng.randrange(world) for kind in kinds}
    return [[kind, ranks[kind], 3 + n * apart + rng.randrange(apart - 1)] for n, kind in enumerate(kinds)]


def compare(start, parallel: str, world: int, kinds, steps: int = STEPS, twin: dict | None = None) -> dict:
    plan = planned(parallel, world, kinds)
    twin = twin or run(start, parallel, world, [], steps)
    found = run(start, parallel, world, plan, steps)
    assert found["told"] == twin["told"], plan
    assert found["end"] == twin["end"], plan
    rows = os.environ.get("ROWS")
    if rows:
        cell = {"parallel": parallel, "world": world, "kinds": kinds, "plan": plan, "steps": steps,
                "losses": len(found["told"]), "redone": found["redone"]}  # fmt: skip
        with open(rows, "a") as file:
            file.write(json.dumps(cell) + "\n")
    return twin


def test_a_sample_of_the_matrix_is_exact(start):
    """FSDP2 on three ranks: an exception, a kill in a save and a hang in one job."""
    compare(start, "FSDP2", 3, ("exception", "SIGKILL during a save", "hang in sleep"))


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("parallel", ["FSDP2", "DDP"])
def test_each_class_of_fault_alone_is_exact(start, parallel, world):
    twin = None
    for kind in CLASSES:
        twin = compare(start, parallel, world, (kind,), twin=twin)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("parallel", ["FSDP2", "DDP"])
def test_all_classes_in_one_job_are_exact(start, parallel, world):
    kinds = list(CLASSES)
    random.Random(world).shuffle(kinds)
    compare(start, parallel, world, tuple(kinds), steps=4 * len(kinds) + 6)
