"""Real scripts under real launchers that know nothing of us: torchrun, bare processes, and none."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.procs

SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import everstep
KIND = sys.argv[1]
def say(row):
    os.write(1, (json.dumps(row) + "\\n").encode())  # in one piece: both ranks write to one pipe

@everstep.resilient
def train(run):
    dist.all_reduce(ones := torch.ones(1))
    say([run.generation, run.rank, run.world_size, int(ones), os.environ["MASTER_PORT"]])
    for step in run.steps(3):
        dist.barrier()
        if run.generation == 0 and step == 2 and run.rank == run.world_size - 1:
            if KIND == "exception":
                raise ValueError("planned")
            if KIND == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if KIND == "kill once" and not os.path.exists(sys.argv[2]):
                open(sys.argv[2], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
    return run.rank

say(["returned", train()])
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def begin(bare, *words, **env):
    own = {"EVERSTEP_TEST_MARK": bare.mark, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | own | env
    )


def ended(*processes):
    """Return (code, what was printed as JSON, stderr) of each."""
    told = [process.communicate(timeout=120) for process in processes]
    return [
        (process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("[")], err)
        for process, (out, err) in zip(processes, told, strict=True)
    ]


def test_a_script_of_one_process(bare, script):
    ((code, rows, err),) = ended(begin(bare, script, "exception"))
    assert code == 0, err
    assert [row[:4] for row in rows] == [[0, 0, 1, 1], [1, 0, 1, 1], ["returned", 0]]
    assert err.count("a world of one rank") == 1
    assert "generation 1 goes on with step 2: step 1 from memory" in err


def test_an_exception_under_torchrun(bare, script):
    ((code, rows, err),) = ended(begin(bare, *TORCHRUN, script, "exception"))
    assert code == 0, err
    assert sorted(row[:4] for row in rows if row[0] != "returned") == [
        [generation, rank, 2, 2] for generation in (0, 1) for rank in (0, 1)
    ]
    assert sorted(row for row in rows if row[0] == "returned") == [["returned", 0], ["returned", 1]]
    assert err.count("torchrun ends all ranks as soon as one process dies") == 1
    assert "`everstep run` keeps the job" in err


@pytest.mark.long
def test_a_death_under_torchrun_is_torchruns(bare, script):
    """It was said at the start; the exit code is torchrun's, and nothing of ours stays."""
    ((code, rows, err),) = ended(begin(bare, *TORCHRUN, script, "kill"))
    assert code == 1
    assert "returned" not in [row[0] for row in rows]
    assert "torchrun ends all ranks as soon as one process dies" in err
    assert "SIGKILL" in err or "exitcode: -9" in err.replace(" ", "")


def test_torchrun_starts_all_ranks_again_and_they_meet_anew(bare, script, tmp_path):
    """`--max-restarts`: the store with the address of the hub before is still there."""
    ((code, rows, err),) = ended(
        begin(bare, *TORCHRUN, "--max-restarts", "1", script, "kill once", str(tmp_path / "killed"))
    )
    assert code == 0, err
    entered = sorted(row[:4] for row in rows if row[0] != "returned")
    assert entered == [[0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 2], [0, 1, 2, 2]]
    assert sorted(row for row in rows if row[0] == "returned") == [["returned", 0], ["returned", 1]]


def test_bare_processes_find_the_launchers_words_as_they_were(bare, script):
    port = str(bare.free_port())
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    found = ended(*(begin(bare, script, "exception", RANK=rank, **where) for rank in "01"))
    for rank, (code, rows, err) in enumerate(found):
        assert code == 0, err
        assert rows == [[0, rank, 2, 2, port], [1, rank, 2, 2, port], ["returned", rank]]


@pytest.mark.long
def test_a_death_among_bare_processes_ends_the_others_with_an_exit_code(bare, script):
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(bare.free_port())}
    began = time.monotonic()
    first, second = ended(*(begin(bare, script, "kill", RANK=rank, **where) for rank in "01"))
    assert second[0] == -signal.SIGKILL
    assert first[0] == 1
    assert "JobEnded: rank 1 is lost" in first[2]
    assert time.monotonic() - began < 100
