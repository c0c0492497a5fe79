"""SIGKILL at each system call of a save, by strace: what a fresh process loads is whole, and never too old (CS-28)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_points.py")
pytestmark = pytest.mark.procs
PROCESSES = ("writer-0", "all@writer-0", "writer-1", "trainer-0", "trainer-1", "agent", "all@agent")
LEAST = {"writer-0": 150, "all@writer-0": 150, "writer-1": 70, "trainer-0": 15, "trainer-1": 15, "agent": 50,
         "all@agent": 50}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def strace():
    """What these tests need of the machine."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian: apt-get install strace), which kills a process at a system call of its own")
    victim = subprocess.Popen(["sleep", "60"])
    try:
        command = ["timeout", "--signal=INT", "0.2", "strace", "-p", str(victim.pid), "-o", "/dev/null"]
        held = subprocess.run(command, capture_output=True, text=True, timeout=30)
    finally:
        victim.kill()
        victim.wait()
    if "Operation not permitted" in held.stderr:
        pytest.skip("needs leave to trace processes (ptrace), which this machine's kernel or container refuses")


def kills(tmp_path, *words, timeout):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), *map(str, words)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if row["fired"]]


def test_a_sample_of_the_points_leaves_a_whole_state_never_older_than_reported(tmp_path):
    fired = kills(tmp_path, "sample", 7, 8, timeout=280)
    assert len(fired) >= 5


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("process", PROCESSES)
def test_each_point_leaves_a_whole_state_never_older_than_reported(tmp_path, process):
    fired = kills(tmp_path, "run", process, timeout=850)
    assert len(fired) >= LEAST[process], "fewer calls than there were: were some left out?"
