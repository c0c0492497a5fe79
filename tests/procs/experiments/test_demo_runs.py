"""The demo waits for no run without end, and keeps what it has recorded."""

import sys

import pytest

from everstep.clock import SYSTEM
from everstep.experiments.demo import run_one

pytestmark = pytest.mark.procs


def test_a_run_gives_its_exit_code_and_its_record(tmp_path):
    line = '{"pid": 1, "rank": 0, "at": 1.0, "step": 1, "loss": "0x1p+1"}'
    told = f"import sys; open({str(tmp_path / 'run.jsonl')!r}, 'w').write({line!r}); sys.exit(7)"
    ran = run_one("run", tmp_path, [sys.executable, "-c", told], 30, SYSTEM)
    assert ran.code == 7
    assert ran.tape().executions[0].loss == "0x1p+1"


def test_a_run_without_a_record_is_an_empty_one(tmp_path):
    ran = run_one("run", tmp_path, [sys.executable, "-c", ""], 30, SYSTEM)
    assert (ran.code, ran.tape().executions) == (0, ())


def test_a_run_that_does_not_end_is_ended(tmp_path):
    ran = run_one("run", tmp_path, [sys.executable, "-c", "import time; time.sleep(600)"], 0.5, SYSTEM)
    assert ran.code == -15
    assert ran.seconds < 10
