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
from everstep.experiments.core.checkpoints import JUDGED, MODES, NVRX_MODE

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


@pytest.mark.parametrize(
    ("ranks", "modes"),
    [
        (1, "everstep,nvrx"),
        (2, "torch.save"),
        *(pytest.param(ranks, ",".join(MODES), marks=pytest.mark.long) for ranks in (1, 2)),
    ],
)
def test_modes_are_rows_of_one_run_and_what_they_call_durable_is_read_back(tmp_path, ranks, modes):
    found = bench("--bandwidth", "unlimited", "--store", str(tmp_path), "--modes", modes, "--ranks", str(ranks))
    rows = {row["mode"]: row for row in found["rows"]}
    assert list(rows) == modes.split(",")
    for row in found["rows"]:
        if row["mode"] == NVRX_MODE and row["efficiency"] is None:
            assert row["outcome"] == "needs CUDA" or "not installed" in row["outcome"]
            continue
        assert (row["outcome"], row["whole"], row["left_behind"]) == ("done", True, 0), row
        assert row["steps"] >= 5
        assert 0 < row["efficiency"] < 1.5
        assert row["age_s"] > 0
    ours = [name for name in rows if name in JUDGED]
    assert [(v["mode"], v["budget_kept"] in (True, False)) for v in found["verdicts"]] == [(n, True) for n in ours]
    assert found["plan"]["ranks"] == ranks
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
