"""A node's own check before it joins: a command of the operator's, whose failure keeps this node out of the job."""

import contextlib
import os
import signal
import subprocess

from everstep.errors import BadNode

LIMIT_S = 120.0
"""A device or a mount that does not answer is no good node's."""
END_S = 2.0
_TOLD = 300


def check(command: str, limit_s: float = LIMIT_S) -> None:
    """Run it in a shell. Raises BadNode, with its last words, where it fails or does not end."""
    process = subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # it may wait inside the kernel, for what it was to look at
            process.wait(END_S)
        raise BadNode(f"this node does not join: --health-check {command!r} has not ended in {limit_s:g} s.") from None
    if process.returncode:
        last = said.strip().rpartition("\n")[2][-_TOLD:]
        how = f"by signal {-process.returncode}" if process.returncode < 0 else f"with {process.returncode}"
        raise BadNode(f"this node does not join: --health-check {command!r} ended {how}{f' ({last})' if last else ''}.")
