"""What `everstep run` is made of: the features ride on the agent, which knows none of them by name."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from everstep import environ
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.shelf import Shelf
from everstep.errors import UsageError
from everstep.faults import flags as faults
from everstep.faults.companion import FaultCompanion
from everstep.goodput.companion import ProgressCompanion
from everstep.goodput.progress import Progress
from everstep.launcher import run as launcher
from everstep.launcher.config import LaunchConfig, bytes_of
from everstep.launcher.run import Riders

EXTENSIONS = ("everstep.faults.flags:add_run_arguments",)
"""What adds flags to torchrun's parser, by name: it runs in the zygote."""


def run(words: Sequence[str]) -> int:
    """Run a job to its end; return the exit code."""
    return launcher.main(words, EXTENSIONS, riders)


def riders(config: LaunchConfig, run_dir: Path) -> Riders:
    """Choose what rides on the agent: snapshots, checkpoints, faults, the display."""
    del run_dir
    display = Progress()
    riding = Riders(sinks=[display])
    if not config.wrapped:
        return riding
    given = config.flags
    cap = given.get("snapshot_memory")
    shelf = Shelf(cap_bytes=None if cap is None else bytes_of(str(cap)), readers=1)
    riding.companions.append(shelf)
    directory = given.get("checkpoint_dir") or environ.get("EVERSTEP_CHECKPOINT_DIR")
    if directory is not None:
        disk = Disk(str(directory), _interval(given.get("checkpoint_interval")), shelf, int(given["checkpoint_keep"]))
        shelf.older = disk.committed
        riding.companions.append(disk)
    request = faults.request_from(argparse.Namespace(**given))
    if request is not None:
        riding.environment |= request.environment()
    riding.companions += [FaultCompanion(request, display.say), ProgressCompanion(display)]
    return riding


def _interval(flag: object) -> int:
    text = environ.get("EVERSTEP_CHECKPOINT_INTERVAL", "100") if flag is None else str(flag)
    assert text is not None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--checkpoint-interval {text}: give a number of steps, 1 or more.")
    return int(text)
