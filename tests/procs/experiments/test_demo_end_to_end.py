"""The promise of the README on a shorter run: five faults, and the proof holds. `make demo` does 200 steps."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]


def test_a_model_trains_through_five_faults_and_nothing_is_lost(tmp_path):
    command = [
        sys.executable,
        "-m",
        "everstep.experiments.demo",
        "--steps",
        "40",
        "--limit",
        "100",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "nothing was lost" in done.stdout
    (page,) = tmp_path.glob("*/run/report.html")
    assert "<html" in page.read_text()[:200].lower()
