"""NVRx's checkpoint names on three ranks over gloo: DCP in the background, local checkpoints, and faults."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]


def test_three_ranks_save_lose_and_find_and_nobody_waits_for_the_dead(tmp_path):
    script = Path(__file__).with_name("nvrx_ranks.py")
    (tmp_path / "d").mkdir()
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "d")], capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stderr
    assert "all ranks agree" in done.stdout
    assert "its bytes were changed" in done.stderr
