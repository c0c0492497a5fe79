"""The checkpoint benchmark with real loops, a real throttle, and a benchmark that is told to end in the midst."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from everstep.clock import SYSTEM
from everstep.errors import ConfigurationError
from everstep.experiments.bench import checkpoint_disk, launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.procs, pytest.mark.timeout(280)]

throttled = pytest.mark.skipif(
    shutil.which("bindfs") is None or not Path("/dev/fuse").exists() or os.geteuid() != 0,
    reason="needs bindfs, /dev/fuse and root: the throttle is a file system",
)
SMALL = ("checkpoint", "--state", "1MB", "--step", "0.01", "--intervals", "5", "--seconds", "0.3")


def bench(*words):
    done = subprocess.run(
        [sys.executable, "-m", "everstep", "bench", *SMALL, *words, "--json"], capture_output=True, text=True,
        timeout=270, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_modes_are_rows_of_one_run_and_what_they_call_durable_is_read_back(tmp_path):
    modes = "everstep,torch.save,dcp.async_save-thread,nvrx"
    found = bench("--bandwidth", "unlimited", "--store", str(tmp_path), "--modes", modes)
    rows = {row["mode"]: row for row in found["rows"]}
    assert list(rows) == modes.split(",")
    for row in found["rows"][:3]:
        assert (row["outcome"], row["whole"], row["left_behind"]) == ("done", True, 0), row
        assert row["steps"] >= 5
        assert 0 < row["efficiency"] < 1.5
        assert row["age_s"] > 0
    assert rows["nvrx"]["outcome"] in ("done", "needs CUDA") or "not installed" in rows["nvrx"]["outcome"]
    assert [(v["mode"], v["budget_kept"] in (True, False)) for v in found["verdicts"]] == [("everstep", True)]
    assert list(tmp_path.iterdir()) == []


@throttled
def test_the_throttle_is_what_a_save_waits_for_and_is_gone_after(tmp_path):
    found = bench("--bandwidth", "1MB/s", "--modes", "torch.save", "--store", str(tmp_path))
    (row,) = found["rows"]
    assert row["outcome"] == "done"
    assert row["write_s"] >= 1.0
    assert row["blocked_s"] > 0.5 * row["saves"], "1 MB at 1 MB/s takes a second, less the throttle's fifth of one"
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert list(tmp_path.iterdir()) == []


@throttled
def test_a_benchmark_that_is_told_to_end_unmounts_and_ends_what_it_has_started(tmp_path):
    words = [sys.executable, "-m", "everstep", "bench", *SMALL, "--modes", "torch.save", "--store", str(tmp_path)]
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("*/throttled/torch.save-5/step-*")):
        assert child.poll() is None
        SYSTEM.sleep(0.02)
    child.terminate()
    assert child.wait(60) == 143
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert not [p for p in psutil.process_iter() if _environ(p).get(launch.TOKEN, "").startswith(f"{child.pid}-")]


@throttled
def test_a_throttle_that_cannot_hold_what_was_asked_is_refused(tmp_path):
    asked = checkpoint_disk.disk(1_000_000_000_000, tmp_path, 1000)
    with pytest.raises(ConfigurationError, match="not what was asked"), asked:
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_flags_cost_other_commands_nothing_heavy():
    code = "import sys, everstep.experiments.bench.commands; print({'psutil', 'rich', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def _environ(process):
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
