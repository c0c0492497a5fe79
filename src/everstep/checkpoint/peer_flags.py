"""What `everstep run` is told of copies of snapshots on other nodes."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import UsageError

INTERVAL = 1
"""Every step, as far as the network allows: intents are coalesced and copies rest as long as they took, so a smaller
interval costs no more than half of a network, and the loss of a node costs no more than it must."""


@dataclass(frozen=True, slots=True)
class Copies:
    """What is asked for. `interval`: steps, 0: no copies; `domain`: what fails together with this node."""

    interval: int = INTERVAL
    copies: int = 1
    domain: str = ""
    asked: bool = False  # by a flag


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of `everstep run`; `copies_of` reads them."""
    group = parser.add_argument_group("copies of snapshots in the memory of other nodes")
    told = {
        "checkpoint-peer-interval": (
            int,
            "Steps from one copy to the next, 0: none (default 1 where there are several nodes and memory suffices).",
        ),
        "checkpoint-peer-copies": (int, "Other nodes that keep each rank's (default 1)."),
        "failure-domain": (
            str,
            "A name for what fails together with this node, a rack say: copies go to nodes of another (default: the "
            "node alone).",
        ),
    }
    for name, (kind, text) in told.items():
        group.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=kind, default=None, help=text)


def copies_of(given: Mapping[str, Any]) -> Copies:
    """Read the flags. UsageError for what cannot be meant."""
    interval, copies = given.get("checkpoint_peer_interval"), given.get("checkpoint_peer_copies")
    for flag, value, least in (("interval", interval, 0), ("copies", copies, 0)):
        if value is not None and int(value) < least:
            raise UsageError(f"--checkpoint-peer-{flag} {value}: give a number, {least} or more; 0 keeps no copies.")
    domain = str(given.get("failure_domain") or "")
    asked = interval is not None or copies is not None or bool(domain)
    return Copies(INTERVAL if interval is None else int(interval), 1 if copies is None else int(copies), domain, asked)


def idle(copies: Copies) -> str | None:
    """Return what an operator is told in a job of one node who has asked for copies."""
    if not copies.asked or not copies.interval or not copies.copies:
        return None
    return "--checkpoint-peer-… and --failure-domain are of no use on one node: nobody is there to keep copies"
