"""CL-18: what eight ranks of one node need in host memory for a restore from disk, all of them together."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from everstep.checkpoint import Checkpointer
from everstep.clock import SYSTEM

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(600)]
RANKS, TENSORS, MIB = 8, 24, 1 << 20
TENSOR = 8 * MIB
STATE = TENSORS * TENSOR
LIMIT_S = 300.0
TRAIN = """
import json, os, sys, time
import torch, torch.distributed as dist
from everstep.checkpoint import Checkpointer
torch.set_num_threads(1)
NOTES, GO, DIRECTORY = sys.argv[1:]
def note(what):
    with open(NOTES, "a") as file:
        file.write(json.dumps({"what": what, "rank": dist.get_rank()}) + "\\n")
dist.init_process_group("gloo")
ckpt = Checkpointer(DIRECTORY)
model = torch.nn.ParameterList(torch.zeros(NUMBERS) for _ in range(TENSORS))
note("ready")
while not os.path.exists(GO):
    time.sleep(0.01)
restored = ckpt.restore({"model": model})
assert restored.step == 1
assert all(bool((p == n + 1).all()) for n, p in enumerate(model))
note("restored")
dist.barrier()
ckpt.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of one rank: what all of a DDP world hold alike."""
    directory = tmp_path_factory.mktemp("saved") / "ckpt"
    model = torch.nn.ParameterList(torch.full((TENSOR // 4,), float(n + 1)) for n in range(TENSORS))
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"model": model}).wait(LIMIT_S)
    return directory


class Group:
    """A control group below ours, version 1 or 2; a job in it can be bounded."""

    def __init__(self):
        self.folder = None
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(",") or not controllers:
                top = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
                folder = top / path.lstrip("/") / f"everstep-test-{uuid.uuid4().hex[:8]}"
                self.limit = folder / ("memory.limit_in_bytes" if controllers else "memory.max")
                with contextlib.suppress(OSError):
                    folder.mkdir()
                    self.folder = folder
                    if self.limit.exists():
                        break
                    self.close()
        if self.folder is None:
            pytest.skip("no control group can be made here")

    def used(self):
        """Without the cache of files, which the kernel takes back."""
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(stat["rss"]) + int(stat["shmem"]) if "rss" in stat else int(stat["anon"]) + int(stat["shmem"])

    def close(self):
        if self.folder is not None:
            self.folder.rmdir()
            self.folder = None


@pytest.fixture
def group():
    made = Group()
    yield made
    for pid in (made.folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    deadline = SYSTEM.now() + 20
    while (made.folder / "cgroup.procs").read_text().strip():
        assert SYSTEM.now() < deadline
        SYSTEM.sleep(0.02)
    made.close()


def begin(folder, saved, group):
    script = folder / "train.py"
    script.write_text(TRAIN.replace("NUMBERS", str(TENSOR // 4)).replace("TENSORS", str(TENSORS)))
    run = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", str(RANKS), "--spares", "0"]
    run += ["--run-dir", str(folder / "run"), str(script), str(folder / "notes"), str(folder / "go"), str(saved)]
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.folder / "cgroup.procs")]
    return subprocess.Popen([*enter, *run], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def notes(folder, what):
    file = folder / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [one for one in map(json.loads, lines) if one["what"] == what]


@pytest.mark.parametrize("room", [4.0, 0.5])
def test_eight_ranks_restore_within_the_bound_and_where_there_is_little_room_too(tmp_path, saved, group, room):
    """Room for `room` times the ranks' states beside what they have. Each keeping its own whole would be killed."""
    job = begin(tmp_path, saved, group)
    deadline = SYSTEM.now() + LIMIT_S
    while len(notes(tmp_path, "ready")) < RANKS:
        assert job.poll() is None, job.communicate()[0]
        assert SYSTEM.now() < deadline
        SYSTEM.sleep(0.05)
    before = group.used()
    free = int(room * RANKS * STATE)
    group.limit.write_text(str(before + free))
    (tmp_path / "go").touch()
    peak = before
    while job.poll() is None and len(notes(tmp_path, "restored")) < RANKS:
        peak = max(peak, group.used())
        assert SYSTEM.now() < deadline
        SYSTEM.sleep(0.005)
    told, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, told
    kept = min(RANKS * STATE, free // 4)
    beside = RANKS * (2 * TENSOR + 24 * MIB)  # a tensor each, windows and what hashes; and a reader's pages
    print(f"room {room}: kept at most {kept / MIB:.0f} MiB, used {(peak - before) / MIB:.0f} MiB")
    assert peak - before <= kept + beside
