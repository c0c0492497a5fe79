"""torchrun's ways to name what is to run: a module, another program, variables instead of flags, one node of some."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.procs

MODULE = """
import json, os, sys
row = [__name__, sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"], os.path.basename(sys.argv[0])]
os.write(1, (json.dumps(row) + "\\n").encode())  # in one piece: both ranks write to one pipe
"""


def run(tmp_path, *words, **env):
    command = [sys.executable, "-m", "everstep.cli", "run", "--run-dir", str(tmp_path / "run"), *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, env=os.environ | env)


@pytest.mark.long
def test_a_module_and_its_arguments(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "work.py").write_text(MODULE)
    done = run(tmp_path, "--nproc-per-node=2", "-m", "pack.work", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    told = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert told == [["__main__", ["--lr", "0.1"], rank, "2", "work.py"] for rank in "01"]


SPAWNS = """
import multiprocessing

class Batch:
    def __init__(self, number):
        self.number = number

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            [batch] = pool.map_async(Batch, [7]).get(40)
        print(method, type(batch) is Batch, batch.number, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("preload", ["torch", "none"])
def test_what_spawned_children_send_back_of_the_script_s_own_classes_arrives(tmp_path, preload):
    """Such an object names `__mp_main__`; a pool whose reader does not know that module waits for ever."""
    (tmp_path / "train.py").write_text(SPAWNS)
    done = run(tmp_path, "--preload", preload, "--max-restarts", "0", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["spawn True 7", "forkserver True 7"]


def test_another_program_with_variables_for_flags(tmp_path):
    """`--no-python`, with PET_NPROC_PER_NODE and PET_MAX_RESTARTS: its exit code counts, and so do its restarts."""
    text = "n=$TORCHELASTIC_RESTART_COUNT; echo rank $RANK of $WORLD_SIZE attempt $n; exit $((RANK && !n))"
    done = run(tmp_path, "--no-python", "sh", "-c", text, PET_NPROC_PER_NODE="2", PET_MAX_RESTARTS="1")
    assert done.returncode == 0, done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith("rank")}
    assert {f"rank {rank} of 2 attempt 1" for rank in "01"} <= lines
    assert "rank 1 of 2 attempt 0" in lines


def test_a_program_that_ends_by_a_signal_is_not_a_success(tmp_path):
    done = run(tmp_path, "--no-python", "--max-restarts", "0", "sh", "-c", "kill -9 $$")
    assert done.returncode == 1
    assert "killed (SIGKILL)" in done.stderr or "ended by signal 9" in done.stderr, done.stderr
