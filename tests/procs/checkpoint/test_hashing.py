"""Snapshots in memory are hashed by a process of their own where no writer reads them: under an agent and a keeper."""

import contextlib
import mmap
import os
import subprocess
import sys

import psutil
import pytest
import torch
import xxhash

from everstep.checkpoint import Checkpointer
from everstep.checkpoint.core.segment import Header, checksum_of, parse
from everstep.clock import SYSTEM

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]
LIMIT_S = 90

JOB = """
import os, sys, time
import torch, everstep
@everstep.resilient
def train(run):
    model = torch.nn.Linear(100, 100)
    for step in run.steps(3, model=model):
        with torch.no_grad():
            model.weight.add_(1)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
train()
"""


def hashed(processes):
    """Return (rank, step) of the snapshots that such processes hold and that are hashed, rightly."""
    found = set()
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for number in os.listdir(f"/proc/{process.pid}/fd"):
                path = f"/proc/{process.pid}/fd/{number}"
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(path).startswith("/memfd:everstep-snapshot-"):
                        found |= read(path)
    return found


def read(path):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
        header = parse(whole)
        expected = checksum_of(whole, header) if isinstance(header, Header) else None
        if expected is None:
            return set()
        payload = whole[header.payload_offset :][: header.payload_bytes]
        assert parse(whole) != header or xxhash.xxh3_64_intdigest(payload) == expected
        return {(header.rank, header.step)}


def until(ready):
    deadline = SYSTEM.now() + LIMIT_S
    while not ready():
        assert SYSTEM.now() < deadline, "it does not come to that"
        SYSTEM.sleep(0.05)


def test_what_a_job_without_a_disk_has_in_memory_is_hashed(tmp_path):
    script, end = tmp_path / "job.py", tmp_path / "end"
    script.write_text(JOB)
    command = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2", "--spares", "0"]
    command += ["--run-dir", str(tmp_path / "run"), str(script), str(end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        agent = psutil.Process(job.pid)
        try:
            until(lambda: hashed([agent]) >= {(0, 3), (0, 2), (1, 3), (1, 2)} or job.poll() is not None)
        finally:
            end.touch()
        told, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told


def test_what_a_plain_loop_has_in_memory_is_hashed(tmp_path):
    tensors = {"t": torch.zeros(1000)}
    with Checkpointer(tmp_path / "ckpt", interval=1000, tiers={"memory": 1}) as saver:
        keeper = psutil.Process(saver._line.pid)
        for step in range(1, 4):
            tensors["t"].add_(1)
            saver.save(step, {"state": tensors})
        until(lambda: hashed([keeper]) >= {(0, 3), (0, 2)})
