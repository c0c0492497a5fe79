"""What Everstep writes, `torch.distributed.checkpoint.load` reads, in a process that does not know Everstep."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]


def test_fsdp2_state_is_loaded_by_worlds_of_the_same_and_of_other_sizes(tmp_path):
    script = Path(__file__).with_name("dcp_worlds.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    assert "all worlds agree" in done.stdout
