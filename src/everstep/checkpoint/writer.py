"""The writer's process: one per rank slot, forked by the agent's zygote, so it belongs to the agent (EXPERIMENTS C9).

A worker's death neither stops nor restarts a write, and it reads what the agent holds, by descriptor. When its line
closes (the agent is gone) it ends at once, in the midst of a write too: what it leaves is swept by the next start.
Signals of a terminal or a scheduler are the agent's business: it decides when a write is no longer wanted.
"""

import os
import platform
import select
import signal
import threading

import torch

from everstep.checkpoint.dcp import metadata_bytes
from everstep.checkpoint.fileops import PosixFiles
from everstep.checkpoint.scribe import Scribe
from everstep.recovery.link import Link

NICENESS = 10
"""A write may take longer; a training step may not."""


def main(link: Link, *, directory: str, rank: int) -> None:
    """Entry of the process: serve until the line closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(link.fileno(),), name="everstep-writer-line", daemon=True).start()
    training = {"torch": str(torch.__version__), "python": platform.python_version()}
    Scribe(link, directory, rank, PosixFiles(), metadata_bytes, training).serve()


def _end_with(line: int) -> None:
    """Wait for the other end to go, without reading; then end the process whatever it is doing."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    while not any(what & gone for _, what in poll.poll()):
        continue
    os._exit(0)
