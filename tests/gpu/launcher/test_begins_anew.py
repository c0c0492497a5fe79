"""A script that knows nothing of Everstep begins anew on a GPU: its memory is seen free first, and who has it named."""

import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SCRIPT = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
free, total = torch.cuda.mem_get_info()
note("begins", attempt=attempt, taken=(total - free) / 2**30)
kept = torch.empty(int(float(os.environ["GIB"]) * 2**30), dtype=torch.uint8, device="cuda").fill_(1)
dist.init_process_group(os.environ["BACKEND"])
value = torch.ones(1000, device="cuda")
for step in range(5):
    dist.all_reduce(value)
    torch.cuda.synchronize()
    note("step", attempt=attempt, step=step)
    if step == 2 and attempt < 3 and dist.get_rank() == attempt % dist.get_world_size():
        if attempt == 1: raise ValueError("fault")
        if attempt == 2: os.abort()
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""
HOLD = """
import torch
kept = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
print("holds", flush=True)
input()
"""


@pytest.mark.parametrize(("ranks", "backend", "gib"), [(1, "nccl", 60), (2, "gloo", 30)])
def test_each_attempt_finds_the_memory_of_the_last_one_free(start, ranks, backend, gib):
    env = {"GIB": str(gib), "BACKEND": backend, "CUDA_VISIBLE_DEVICES": "0"}
    if ranks > 1:
        env["CUDA_VISIBLE_DEVICES"] = "0,0"
    text = SCRIPT if ranks == 1 else "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n" + SCRIPT
    ended = start(text, "--nproc-per-node", str(ranks), "--max-restarts", "3", env=env, wrapped=False).ended()
    assert ended.code == 0, ended.err[-4000:]
    assert {n["attempt"] for n in ended.of("begins")} == {0, 1, 2, 3}
    for begins in ended.of("begins"):  # the other rank of the same attempt may have begun
        assert begins["taken"] < gib + 3, begins
    assert "still has" not in ended.err


def test_a_stranger_on_the_gpu_is_named_and_not_waited_for(start):
    stranger = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"holds\n"
        env = {"GIB": "1", "BACKEND": "nccl", "CUDA_VISIBLE_DEVICES": "0"}
        ended = start(SCRIPT, "--max-restarts", "3", env=env, wrapped=False).ended()
        assert ended.code == 0, ended.err[-4000:]
        told = [line for line in ended.err.splitlines() if "GPU 0 still has" in line]
        assert len(told) == 3, ended.err
        assert all(f"MiB taken by pid {stranger.pid} (" in line for line in told)
    finally:
        stranger.communicate(b"\n")
