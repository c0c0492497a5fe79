"""FSDP1 under real collectives: its ranks go on to the bit, and DCP reads what they wrote in a world of one."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

OTHERS = [
    (ranks, strategy, kind)
    for ranks in (2, 3, 4)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for kind in ("flat", "original")
    if (ranks, strategy, kind) != (3, "SHARD_GRAD_OP", "original")
]


@pytest.mark.parametrize(
    ("ranks", "strategy", "kind"),
    [(3, "SHARD_GRAD_OP", "original"), *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)],
)
def test_ranges_of_flat_parameters_are_taken_up_by_fsdp1_and_by_dcp(ranks, strategy, kind, tmp_path):
    """M5, C7: no state dict of FSDP1 is called; a model that an evaluation left unsharded is saved and restored."""
    script = Path(__file__).with_name("fsdp1_worlds.py")
    command = [sys.executable, str(script), str(tmp_path), str(ranks), strategy, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "all agree" in done.stdout
