"""A rank that the kernel kills for lack of memory, in a control group of its own: the job says that it was that."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from everstep.clock import SYSTEM

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180), pytest.mark.long]
MIB = 1 << 20
SCRIPT = """
import os, sys
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 8)
print("trained")
"""


@pytest.fixture
def group():
    """A control group whose members may have 1 GiB together; what is in it at the end is killed."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            top = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
            made = top / path.lstrip("/") / f"everstep-test-{uuid.uuid4().hex[:8]}"
            limit = "memory.limit_in_bytes" if controllers else "memory.max"
            with contextlib.suppress(OSError):
                made.mkdir()
                (made / limit).write_text(str(1024 * MIB))
                break
    else:
        pytest.skip("no control group can be made here")
    yield made
    while pids := (made / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        SYSTEM.sleep(0.02)
    made.rmdir()


def test_a_rank_that_is_killed_for_lack_of_memory_is_named_so_and_the_limit_with_it(tmp_path, group):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    run = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*enter, *run, "--run-dir", str(tmp_path / "run"), str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "killed by the kernel for lack of memory" in done.stderr
    assert f"{group.name} allows 1.00 GiB" in done.stderr
