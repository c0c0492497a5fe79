from pathlib import Path

import pytest

from everstep.events import Event, FaultInjected, ProcessStarted, Record, StepDone
from everstep.experiments import demo
from everstep.experiments.proof import Struck
from everstep.goodput.core.accounting import account
from everstep.telemetry import Telemetry
from everstep.testing import simulated_run


class Kept:
    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


def records(*events: tuple[float, Event]) -> list[Record]:
    kept = Kept()
    telemetry = Telemetry("agent", [kept])
    for at_s, event in events:
        telemetry.emit(event, at_s=at_s)
    return kept.records


def test_the_ledger_tells_when_faults_struck_and_processes_began():
    fault = {"type": "sigkill", "step": 3, "injured_rank": 0, "position": "forward"}
    found = records(
        (1.0, ProcessStarted(name="worker-0", child_pid=10, incarnation="b.10.1")),
        (2.0, ProcessStarted(name="spare-2", child_pid=12, incarnation="b.12.1")),
        (3.0, StepDone(step=1, seconds=0.1)),
        (5.0, FaultInjected(fault=4, **fault)),
    )
    assert demo.started(found) == {10: 1.0, 12: 2.0}
    assert demo.struck(found) == (Struck(4, 5.0),)


def test_the_twin_differs_from_the_run_in_its_name_and_the_faults_alone():
    args = demo.parser().parse_args(["--steps", "50", "--nproc", "3", "--parallel", "ddp"])
    folder = Path("/out")
    twin = demo.everstep_command(args, folder, "twin", [])
    run = demo.everstep_command(args, folder, "run", ["--fault-count", "5"])
    same = [word for word in run if word not in ("--fault-count", "5")]
    assert [word.replace("twin", "run") for word in twin] == same
    assert run[-1] == "/out/run.jsonl"
    assert run[run.index("--nproc-per-node") + 1] == "3"


def test_a_script_that_is_not_there_is_a_usage_error(tmp_path, capsys):
    assert demo.main(["--script", str(tmp_path / "none.py"), "--out", str(tmp_path)]) == 64
    assert "none.py does not exist" in " ".join(capsys.readouterr().out.split())


def test_what_the_time_went_to_adds_up():
    ledger = account(simulated_run.SimulatedRun(ranks=2, steps=20).run())
    shares = demo.shares(ledger)
    assert sum(share for _, share in shares) == pytest.approx(1.0, abs=0.01)
    assert shares == sorted(shares, key=lambda pair: -pair[1])
