"""Real file systems that are full or read-only, in a mount namespace of their own: told by name, nothing lost."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.procs

PRELUDE = """
import os, sys
from everstep.checkpoint import catalog
from everstep.checkpoint.directory import Claim
from everstep.checkpoint.fileops import PosixFiles
from everstep.errors import ConfigurationError
from everstep.testing.disk_bench import DiskBench
where = sys.argv[1]
"""

READ_ONLY = """
try:
    Claim(where + "/ckpt").take("run")
except ConfigurationError as error:
    print(error.exit_code, error)
"""

FULL = """
bench = DiskBench(where, interval=10, keep=None, files=lambda rank: PosixFiles())
bench.enter()
bench.steps(1, 300)
whole, failed = bench.tiers("committed"), bench.tiers("failed")
assert whole == list(range(10, whole[-1] + 1, 10)), whole
assert len(failed) > 3, failed
assert all("No space left on device (ENOSPC); free space there" in text for text in bench.disk.problems())
assert len(bench.disk.problems()) == len(failed)
assert not [name for name in os.listdir(where) if name.endswith(".tmp")], os.listdir(where)
assert [found.step for found in catalog.scan(where)] == whole[::-1]
assert not [wound for found in catalog.scan(where) for wound in catalog.verify(found)]
os.unlink(where + "/ballast")
bench.steps(301, 310)
assert bench.drain()
assert bench.tiers("committed")[-1] == 310, bench.tiers("committed")
bench.close()
print("survived", len(failed), "failed saves")
"""


def on_its_own_mount(tmp_path, options, after, program):
    """Run a program on a fresh tmpfs that only it sees."""
    shell = f'mount -t tmpfs -o {options} none "$1" && {after} && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(tmp_path), sys.executable, PRELUDE + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr.split("\n")[0]):
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_read_only_file_system_is_refused_before_the_first_step(tmp_path):
    told = on_its_own_mount(tmp_path, "size=1m", 'mount -o remount,ro "$1"', READ_ONLY)
    assert told.startswith("78 ")
    assert "Read-only file system" in told
    assert "Give --checkpoint-dir" in told


def test_a_disk_that_fills_up_fails_saves_by_name_and_serves_again_when_there_is_room(tmp_path):
    told = on_its_own_mount(tmp_path, "size=600k", 'head -c 200000 /dev/zero > "$1/ballast"', FULL)
    assert told.startswith("survived")
