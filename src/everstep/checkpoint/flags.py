"""What `everstep run` is told of the directories that checkpoints go to: by flags, else by the environment."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep import environ
from everstep.checkpoint.core.retention import LESS, Keep
from everstep.checkpoint.storage.opening import is_url, place_of
from everstep.checkpoint.tier_settings import LOCAL, MAIN
from everstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """One directory, or the URL of an object store."""

    tier: str
    directory: str
    interval: int  # steps
    keep: Keep


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the node's own directory to the parser of `everstep run`; `places` reads them."""
    group = parser.add_argument_group("a second directory for checkpoints, on the node's own disk")
    told = {
        "dir": (None, "Where checkpoints are committed beside --checkpoint-dir: nearer, and faster."),
        "interval": (int, "Steps from one checkpoint there to the next (default 10)."),
        "keep": (int, "The newest complete checkpoints that are kept there (default 2)."),
    }
    for name, (kind, text) in told.items():
        dashed = f"--checkpoint-local-{name}"
        underscored = "--" + dashed[2:].replace("-", "_")
        group.add_argument(dashed, underscored, dest=f"checkpoint_local_{name}", type=kind or str, help=text)


def places(given: Mapping[str, Any]) -> list[Place]:
    """Return where checkpoints go, the shared directory first. UsageError for what cannot be meant."""
    found: list[Place] = []
    main = given.get("checkpoint_dir") or environ.get("EVERSTEP_CHECKPOINT_DIR")
    if main is not None:
        every = _steps(given.get("checkpoint_interval"), "--checkpoint-interval", "EVERSTEP_CHECKPOINT_INTERVAL", "100")
        found.append(Place(MAIN, str(main), every, _keep(given)))
    elif given.get("checkpoint_interval") is not None:
        _steps(given["checkpoint_interval"], "--checkpoint-interval", "", "")
    local = given.get("checkpoint_local_dir") or environ.get("EVERSTEP_CHECKPOINT_LOCAL_DIR")
    if local is not None:
        found.append(_local(str(local), given, found))
    return found


def _local(local: str, given: Mapping[str, Any], others: list[Place]) -> Place:
    if is_url(local):
        raise UsageError(
            f"--checkpoint-local-dir {local}: give a directory of this node; a URL is for --checkpoint-dir."
        )
    if any(place_of(local) == place_of(other.directory) for other in others):
        raise UsageError(f"--checkpoint-local-dir and --checkpoint-dir are one directory, {local}: give each its own.")
    every = _steps(
        given.get("checkpoint_local_interval"),
        "--checkpoint-local-interval",
        "EVERSTEP_CHECKPOINT_LOCAL_INTERVAL",
        "10",
    )
    keep = given.get("checkpoint_local_keep")
    return Place(LOCAL, local, every, Keep() if keep is None else Keep(int(keep)))


def _keep(given: Mapping[str, Any]) -> Keep:
    """What `--checkpoint-keep` and the flags beside it ask for. UsageError where they cannot be meant."""
    name, _, mode = str(given.get("checkpoint_metric") or "").partition(":")
    best = int(given.get("checkpoint_keep_best") or 0)
    if bool(name) != bool(best):
        raise UsageError("--checkpoint-keep-best and --checkpoint-metric are of use only together: give both, or none.")
    return Keep(int(given["checkpoint_keep"]), given.get("checkpoint_keep_every"), best, name, mode or LESS)


def _steps(flag: object, name: str, variable: str, default: str) -> int:
    text = environ.get(variable, default) if flag is None else str(flag)
    assert text is not None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} {text}: give a number of steps, 1 or more.")
    return int(text)
