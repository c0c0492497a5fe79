"""A whole script of NVRx's checkpointing, after the one command that changes its imports, with and without a fault."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
LIMIT_S = 120
STEPS = 15


@pytest.fixture
def ported(tmp_path, root):
    """The script after the command as the page on compatibility gives it."""
    if shutil.which("sed") is None:
        pytest.skip("needs sed")
    command = next(line for line in (root / "docs/compat-nvrx.md").read_text().splitlines() if line.startswith("sed "))
    shutil.copy(HERE / "nvrx_train.py", tmp_path / "train.py")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    return tmp_path / "train.py"


class Ran:
    """One job of two ranks, to its end."""

    def __init__(self, script, name, *more):
        folder = script.parent
        self.dir, notes = folder / name, folder / f"{name}.notes"
        command = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2", "--spares", "0"]
        command += ["--run-dir", str(folder / f"{name}.run"), str(script), "--dir", str(self.dir), *more]
        done = subprocess.run(
            command,
            env=os.environ | {"NOTES": str(notes)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.notes = [json.loads(line) for line in notes.read_text().splitlines()]
        self.told = done.stderr

    def of(self, what):
        return [note for note in self.notes if note["what"] == what]

    def losses(self):
        """The last word on each step of each rank."""
        return {(note["rank"], note["step"]): note["loss"] for note in self.of("step")}


@pytest.mark.long
def test_a_script_of_nvrxs_checkpointing_runs_as_it_is_and_a_fault_among_its_saves_costs_what_was_under_way(ported):
    """CS-39, W44: a save that was under way at an in-process restart is dropped, on the rank whose saves stood still:
    what had its name before is whole. The next attempt goes on from the newest that all can have, and saves again.
    """
    twin = Ran(ported, "twin")
    hurt = Ran(ported, "hurt", "--wound")
    assert len(twin.of("begun")) == 2
    (wounded,) = hurt.of("wounded")
    begun = sorted((n["iteration"], n["rank"], n["first"]) for n in hurt.of("begun"))
    assert [n[:2] for n in begun] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert begun[2][2] == begun[3][2], "both go on from one iteration"
    assert begun[3][2] in (wounded["step"] - 5, wounded["step"])  # the later one where rank 0 had both parts by then
    assert len({n["pid"] for n in hurt.of("begun")}) == 2, "every process was kept"
    again = [n["there"] for n in hurt.of("begun") if n["iteration"] == 1]
    assert all("step-10" not in there for there in again), "nothing is published that one rank has not written"
    for job in (twin, hurt):
        assert [(n["same"], n["own"]) for n in job.of("loaded")] == [(True, STEPS)] * 2
        assert job.losses().keys() == {(rank, step) for rank in (0, 1) for step in range(1, STEPS + 1)}
        left = [name for _, _, files in os.walk(job.dir) for name in files if name.endswith((".tmp", ".dirty"))]
        assert left == []
        assert dcp.FileSystemReader(str(job.dir / f"step-{STEPS}")).read_metadata().state_dict_metadata
    assert hurt.losses() == twin.losses()
