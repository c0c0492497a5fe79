"""What `everstep run` is made of: the features ride on the agent, which knows none of them by name."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from everstep import __version__
from everstep.checkpoint import flags, peer_flags
from everstep.checkpoint.core.budget import bytes_of
from everstep.checkpoint.disks import disks_of, nearest_first
from everstep.checkpoint.hashing import Hashing
from everstep.checkpoint.node_shelf import NodeShelf
from everstep.checkpoint.peer import COPY_BUFFERS, Peer
from everstep.checkpoint.shares import shares
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.source import Source
from everstep.checkpoint.tier_settings import LOCAL, MAIN
from everstep.errors import UsageError
from everstep.fault_tolerance import storage
from everstep.fault_tolerance.core.terms import of_policy
from everstep.fault_tolerance.cycles import Cycles, settings_of
from everstep.fault_tolerance.logfile import LogFile
from everstep.faults import flags as faults
from everstep.faults.companion import FaultCompanion
from everstep.goodput.companion import ProgressCompanion
from everstep.goodput.comparison import ComparisonCompanion
from everstep.goodput.progress import Progress
from everstep.launcher import run as launcher
from everstep.launcher.config import LaunchConfig
from everstep.launcher.run import Riders
from everstep.process.monitor import SETTINGS
from everstep.recovery.api import Companion

EXTENSIONS = (
    "everstep.faults.flags:add_run_arguments",
    "everstep.checkpoint.flags:add_run_arguments",
    "everstep.checkpoint.peer_flags:add_run_arguments",
    "everstep.launcher.control.flags:add_run_arguments",
    "everstep.fault_tolerance.flags:add_run_arguments",
)
"""What adds flags to torchrun's parser, by name: it runs in the zygote."""


FT_LAUNCHER = "everstep.fault_tolerance.flags:act_as_ft_launcher"
"""What makes `everstep run` `ft_launcher`."""


def run(words: Sequence[str], *, as_ft_launcher: bool = False) -> int:
    """Run a job to its end; return the exit code."""
    extensions = (*EXTENSIONS, FT_LAUNCHER) if as_ft_launcher else EXTENSIONS
    return launcher.main(words, extensions, riders, __version__)


def riders(config: LaunchConfig) -> Riders:
    """Choose what rides on the agent: snapshots, checkpoints, faults, the display.

    Called before the run folder is made. Raises UsageError for flags that cannot be meant.
    """
    display = Progress()
    riding = Riders(sinks=[display])
    given = config.flags
    _take_ft_launcher_s(config, riding)
    request = faults.request_from(argparse.Namespace(**given))
    if not config.wrapped:
        if request is not None:
            raise UsageError(
                f"faults are injected at the steps of a wrapped function, and neither {config.script} nor what it "
                "imports from beside it names everstep. Call everstep.faults.maybe_fail(step) in its loop, or wrap the "
                "training function in @everstep.resilient; or leave the --fault-… flags out."
            )
        return riding
    places = flags.places(given)
    cap = given.get("snapshot_memory")
    several = config.several
    if several and any(place.tier == LOCAL for place in places):
        raise UsageError(
            f"--checkpoint-local-dir with --nnodes {config.nodes_text}: what the disk of one node holds of a "
            "checkpoint is lost with that node. Leave it out, and EVERSTEP_CHECKPOINT_LOCAL_DIR too: --checkpoint-dir "
            "names a directory that all nodes share."
        )
    cap_bytes, readers = None if cap is None else bytes_of(str(cap)), max(1, len(places))
    copies = peer_flags.copies_of(given)
    shelf, source, peer = _copied(copies, len(places), cap_bytes) if several else _alone(cap_bytes, readers)
    riding.notices += [text for text in [peer_flags.idle(copies)] if text and not several]
    disks = disks_of(places, source, config.grace_s, several=several)
    shelf.older = lambda: nearest_first(disks)
    riding.companions += [shelf, Hashing(shelf), *peer, *disks]
    if not any(place.tier == MAIN for place in places) and given.get("checkpoint_interval") is not None:
        riding.notices.append(
            f"--checkpoint-interval {given['checkpoint_interval']} is of no use alone: nothing is written to disk "
            "without --checkpoint-dir"
        )
    if request is not None:
        riding.environment |= request.environment()
    riding.companions += [FaultCompanion(request, display.say), ProgressCompanion(display), ComparisonCompanion()]
    return riding


def _take_ft_launcher_s(config: LaunchConfig, riding: Riders) -> None:
    """What NVRx's flags ask for, in a wrapped job and in another."""
    given = config.flags
    riding.notices += given.get("ft_notices") or ()
    if given.get("fault_tolerance"):
        riding.environment[SETTINGS] = json.dumps(given["fault_tolerance"])
    said = of_policy(given.get("ft_restart_policy"), wrapped=config.wrapped)
    riding.notices += [said] if said else []
    storage.require(given.get("must_reach") or (), distributed=bool(given.get("must_reach_mounts")))
    if given.get("nvrx_logfile"):
        riding.sinks.append(LogFile(given["nvrx_logfile"]))
    settings = settings_of(given.get("ft_cycles") or {}, config.cycle_log)
    if config.wrapped and settings.iteration_file:
        riding.notices.append(
            "--ft-checkpoint-iteration-file changes nothing: steps are seen in a wrapped function; three faults alike "
            "at one step end the job"
        )
        settings = replace(settings, iteration_file=None)
    if settings.wanted:
        cycles = Cycles(settings)
        riding.companions.append(cycles)
        if settings.info_dir:
            riding.environment["NVRX_CURRENT_CYCLE_INFO"] = cycles.link


def _alone(cap_bytes: int | None, readers: int) -> tuple[Shelf, Source, list[Companion]]:
    shelf = Shelf(cap_bytes=cap_bytes, readers=readers)
    return shelf, shelf, []


def _copied(copies: peer_flags.Copies, readers: int, cap_bytes: int | None) -> tuple[Shelf, Source, list[Companion]]:
    """Make the memory tier of one node among several, what slower tiers see of it, and what carries copies."""
    kept = copies.interval > 0 and copies.copies > 0
    shelf = NodeShelf(cap_bytes=cap_bytes, readers=readers, for_copies=COPY_BUFFERS if kept else 0)
    for_disks, for_copies = shares(shelf, 2)
    peer = Peer(
        shelf, for_copies, interval=copies.interval, copies=copies.copies, domain=copies.domain, cap_bytes=cap_bytes
    )
    return shelf, for_disks, [peer]
