"""`maybe_fail` without an agent: the run folder remembers."""

import argparse

import pytest

from everstep import environ
from everstep.errors import UsageError
from everstep.faults import add_arguments, flags, maybe_fail
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, PlannedFault, plan
from everstep.faults.injectors import InjectedFault
from everstep.faults.loop import disconnect
from everstep.telemetry import read_lines

NAMES = ("RANK", "WORLD_SIZE", "EVERSTEP_RUN_DIR", flags.LAUNCHER_ASKED)


@pytest.fixture(autouse=True)
def surroundings():
    environ.remove(*NAMES)
    disconnect()
    yield
    environ.remove(*NAMES)
    disconnect()


def ask(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.parse_args(words)


def run(steps):
    """One life of a process; return the steps at which it was hit."""
    disconnect()
    hit = []
    for step in range(1, steps + 1):
        try:
            maybe_fail(step)
        except InjectedFault:
            hit.append(step)
    return hit


def test_nothing_asked_nothing_done():
    assert run(50) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_each_fault_once_over_the_lives_of_a_job(tmp_path, rank):
    environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "EVERSTEP_RUN_DIR": str(tmp_path)})
    ask("--fault-count", "4", "--fault-seed", "3", "--fault-steps", "50")
    mine = [f for f in plan(3, 4, ("exception",), (), 2, 50).faults if f.rank == rank]
    assert run(50) == [f.step for f in mine]
    assert run(50) == []
    records, unread = read_lines((tmp_path / "events").iterdir())
    assert unread == []
    assert [(r.event.fault, r.event.injured_rank, r.event.position) for r in records] == [
        (f.index, rank, "boundary") for f in mine
    ]


def test_the_launcher_s_plan_is_found_in_the_run_folder(tmp_path):
    environ.update({"EVERSTEP_RUN_DIR": str(tmp_path), flags.LAUNCHER_ASKED: "1"})
    with pytest.raises(UsageError, match="add --fault-steps"):
        maybe_fail(1)
    text = codec.dumps(Plan((PlannedFault(0, 7, 0, "exception", "forward"), PlannedFault(1, 9, 1, "exit", "forward"))))
    (tmp_path / "faults.json").write_text(text)
    assert run(20) == [7]
    assert run(20) == []


def test_what_is_missing_is_named(tmp_path):
    ask("--fault-count", "1")
    with pytest.raises(UsageError, match="set EVERSTEP_RUN_DIR"):
        maybe_fail(1)
    environ.update({"EVERSTEP_RUN_DIR": str(tmp_path)})
    with pytest.raises(UsageError, match="add --fault-steps"):
        maybe_fail(1)
