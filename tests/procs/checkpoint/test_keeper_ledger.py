"""What a Checkpointer's saves come to, in the ledger of its run."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]
SCRIPT = """
import sys
import torch
from everstep.checkpoint.checkpointer import Checkpointer
state = {"w": torch.zeros(1000)}
with Checkpointer(sys.argv[1], interval=5, tiers={"memory": 1}) as saved:
    for step in range(1, 21):
        state["w"] += 1
        saved.save(step, state).wait(60)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("under", ["alone", "an agent"])
def test_a_checkpointer_tells_of_its_tiers_in_the_run_folder(tmp_path, under):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [str(tmp_path / "script.py"), str(tmp_path / "ckpt")]
    run = str(tmp_path / "run")
    if under == "alone":
        environment = {**os.environ, "EVERSTEP_RUN_DIR": run}
        subprocess.run([sys.executable, *words], check=True, timeout=90, env=environment)
    else:
        flags = ["run", "--run-dir", run, "--nproc-per-node", "1", "--spares", "0"]
        subprocess.run([sys.executable, "-m", "everstep.cli", *flags, *words], check=True, timeout=90)
    told = subprocess.run(
        [sys.executable, "-m", "everstep.cli", "report", run, "--json"], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stdout + told.stderr
    memory, disk = json.loads(told.stdout)["tiers"]
    assert (memory["tier"], memory["committed"], memory["newest_durable_step"]) == ("memory", 20, 20)
    assert memory["bytes"] >= 20 * 4000
    assert (disk["tier"], disk["taken"], disk["committed"], disk["failed"]) == ("disk", 4, 4, 0)
    assert disk["achieved_interval_steps"] == 5
    assert disk["age_s"] >= memory["age_s"] >= 0
