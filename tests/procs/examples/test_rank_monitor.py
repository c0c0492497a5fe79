"""The example of a rank monitor: a hang is found by the timeout that it has calculated, and the job goes on."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(180)]


def test_a_hang_is_found_by_a_calculated_timeout_and_the_job_goes_on(root, tmp_path):
    command = [
        sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2", "--max-restarts", "1", "--run-dir", "run",
        "--ft-rank-section-timeouts", "setup:60,step:120,checkpointing:30",
        str(root / "examples/rank_monitor.py"), "--hang", "40",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 40: rank 1 hangs" in done.stdout
    (limit,) = re.findall(r"section 'step' is open for [\d.]+ s, \w+; limit ([\d.]+) s", done.stderr)
    assert float(limit) < 60, "120 s were given, and less was calculated"
    assert re.search(r"step 60: loss [\d.]+; a step may last [\d.]+ s", done.stdout)


@pytest.mark.parametrize("module", ["nvidia_resiliency_ext", "everstep"])
def test_the_same_file_runs_under_either_launcher_after_a_change_of_import(root, tmp_path, module):
    """Without a hang: `make peers` has made the other's environment."""
    python = root / ".venv-peers/bin/python" if module != "everstep" else sys.executable
    if module != "everstep" and not python.exists():
        pytest.skip("`make peers` has not been run here")
    text = (root / "examples/rank_monitor.py").read_text().replace("from everstep.", f"from {module}.")
    (tmp_path / "script.py").write_text(text)
    flags = ("--nproc-per-node", "2", "--ft-rank-section-timeouts", "setup:60,step:60,checkpointing:30")
    command = [
        python,
        "-m",
        f"{module}.fault_tolerance.launcher",
        *flags,
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "script.py",
    ]
    environment = os.environ | ({"PYTHONPATH": ""} if module != "everstep" else {})
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 60: loss [\d.]+; a step may last [\d.]+ s", done.stdout)
