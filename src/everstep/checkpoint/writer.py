"""The writer process: one for each rank slot, forked by the agent from the zygote, or by the keeper of a plain loop.

It outlives the worker whose state it writes, so it belongs to whoever holds that state (EXPERIMENTS C9).

A worker's death neither stops nor restarts a write, and it reads what the agent holds, by descriptor. When its line
closes (the agent is gone) it ends at once, in the midst of a write too: what it leaves is swept by the next start.
Signals of a terminal or a scheduler are the agent's business: it decides when a write is no longer wanted.

torch is loaded by who describes a checkpoint for others: a zygote has it already, and the first writer of a keeper,
which merges, loads it beside its first shard.
"""

import os
import platform
import select
import signal
import threading
from collections.abc import Mapping
from importlib import import_module

from everstep.checkpoint.core.manifest import Manifest
from everstep.checkpoint.scribe import Scribe
from everstep.recovery.link import Link

NICENESS = 10
"""A write may take longer; a training step may not."""


def main(link: Link, *, directory: str, rank: int, training: Mapping[str, str] | None = None) -> None:
    """Entry of the process: serve until the line closes. `training`: with what versions the job trains."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(link.fileno(),), name="everstep-writer-line", daemon=True).start()
    if training is not None and rank == 0:
        threading.Thread(target=_load, name="everstep-writer-load", daemon=True).start()
    Scribe(link, directory, rank, None, describe, training or _versions()).serve()


def describe(manifest: Manifest) -> bytes:
    """Return DCP's metadata."""
    from everstep.checkpoint.dcp import metadata_bytes  # noqa: PLC0415 - torch, where it is not loaded already

    return metadata_bytes(manifest)


def _load() -> None:
    import_module("everstep.checkpoint.dcp")  # whoever describes finds it loaded


def _versions() -> dict[str, str]:
    import torch  # noqa: PLC0415 - loaded by the zygote

    return {"torch": str(torch.__version__), "python": platform.python_version()}


def _end_with(line: int) -> None:
    """Wait for the other end to go, without reading; then end the process whatever it is doing."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    while not any(what & gone for _, what in poll.poll()):
        continue
    os._exit(0)
