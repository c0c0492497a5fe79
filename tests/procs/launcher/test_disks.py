"""A run folder on a file system that is full: logs and events are lost and told of, training is not (LA-25)."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.procs

SCRIPT = """
import os, shutil, signal, sys
import torch.distributed as dist
import everstep
def fault(name):
    if os.path.exists(name):
        return False
    open(name, "w").close()
    return True
@everstep.resilient
def train(run):
    for step in run.steps(80):
        dist.barrier()
        print("step", step, "x" * 500)
        if run.rank == 1 and step == 4 and fault("fill"):
            with open(os.environ["FULL"] + "/ballast", "wb") as file:
                try:
                    while file.write(b"x" * 4096) and not file.flush():
                        pass
                except OSError:
                    pass
            os.kill(os.getpid(), 9)
        if run.rank == 0 and step == 72 and fault("free"):
            os.unlink(os.environ["FULL"] + "/ballast")
            shutil.rmtree(os.environ["FULL"] + "/run/logs")
            os.kill(os.getpid(), 9)
    os.write(2, f"returned {run.rank}\\n".encode())
train()
"""


def test_a_full_disk_and_a_removed_folder_of_logs_cost_no_step(tmp_path):
    mount = tmp_path / "full"
    mount.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2", "--redirects", "1", "--run-dir"]
    mounted = 'mount -t tmpfs -o size=256k,nr_inodes=40 none "$FULL"'
    shell = mounted + ' && "$@"; code=$?; cat "$FULL"/run/events/agent-*; exit $code'
    command = ["unshare", "-m", "bash", "-c", shell, "-", *job, str(mount / "run"), str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"FULL": str(mount)}, check=False
    )
    if "unshare failed" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("no mount namespace here")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("returned") == 2
    assert "cannot be written, events of this run are lost" in ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert "RunEnded" in [line["event"] for line in lines]
