"""What `everstep run` is made of: the features ride on the agent, which knows none of them by name."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from everstep import environ
from everstep.checkpoint.core.budget import bytes_of
from everstep.checkpoint.core.retention import LESS, Keep
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.holder import Held
from everstep.checkpoint.shelf import Shelf
from everstep.errors import UsageError
from everstep.faults import flags as faults
from everstep.faults.companion import FaultCompanion
from everstep.goodput.companion import ProgressCompanion
from everstep.goodput.comparison import ComparisonCompanion
from everstep.goodput.progress import Progress
from everstep.launcher import run as launcher
from everstep.launcher.config import LaunchConfig
from everstep.launcher.run import Riders

EXTENSIONS = ("everstep.faults.flags:add_run_arguments",)
"""What adds flags to torchrun's parser, by name: it runs in the zygote."""


def run(words: Sequence[str]) -> int:
    """Run a job to its end; return the exit code."""
    return launcher.main(words, EXTENSIONS, riders)


def riders(config: LaunchConfig) -> Riders:
    """Choose what rides on the agent: snapshots, checkpoints, faults, the display.

    Called before the run folder is made. Raises UsageError for flags that cannot be meant.
    """
    display = Progress()
    riding = Riders(sinks=[display])
    given = config.flags
    request = faults.request_from(argparse.Namespace(**given))
    if not config.wrapped:
        if request is not None:
            raise UsageError(
                f"faults are injected at the steps of a wrapped function, and neither {config.script} nor what it "
                "imports from beside it names everstep. Call everstep.faults.maybe_fail(step) in its loop, or wrap the "
                "training function in @everstep.resilient; or leave the --fault-… flags out."
            )
        return riding
    cap = given.get("snapshot_memory")
    shelf = Shelf(cap_bytes=None if cap is None else bytes_of(str(cap)), readers=1)
    riding.companions.append(shelf)
    directory = given.get("checkpoint_dir") or environ.get("EVERSTEP_CHECKPOINT_DIR")
    if directory is None and given.get("checkpoint_interval") is not None:
        interval = _interval(given["checkpoint_interval"])
        riding.notices.append(
            f"--checkpoint-interval {interval} is of no use alone: nothing is written to disk without --checkpoint-dir"
        )
    if directory is not None:
        disk = Disk(
            str(directory), _interval(given.get("checkpoint_interval")), shelf, _keep(given),
            hold=Held(str(directory)), grace_s=config.grace_s,
        )  # fmt: skip
        shelf.older = disk.committed
        riding.companions.append(disk)
    if request is not None:
        riding.environment |= request.environment()
    riding.companions += [FaultCompanion(request, display.say), ProgressCompanion(display), ComparisonCompanion()]
    return riding


def _keep(given: Mapping[str, Any]) -> Keep:
    """What `--checkpoint-keep` and the flags beside it ask for. UsageError where they cannot be meant."""
    name, _, mode = str(given.get("checkpoint_metric") or "").partition(":")
    best = int(given.get("checkpoint_keep_best") or 0)
    if bool(name) != bool(best):
        raise UsageError("--checkpoint-keep-best and --checkpoint-metric are of use only together: give both, or none.")
    return Keep(int(given["checkpoint_keep"]), given.get("checkpoint_keep_every"), best, name, mode or LESS)


def _interval(flag: object) -> int:
    text = environ.get("EVERSTEP_CHECKPOINT_INTERVAL", "100") if flag is None else str(flag)
    assert text is not None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--checkpoint-interval {text}: give a number of steps, 1 or more.")
    return int(text)
