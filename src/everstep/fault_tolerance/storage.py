"""`--ft-storage-health-check-path` and `--ft-enable-dist-storage-healthcheck`: what a node must reach before it joins.

Looked at by a process of its own, since storage that hangs would take the agent along: `python -m` this module with the
paths, which prints a line for each that is not fit. The same rules as NVRx's HEAD (its usage guide, "Health checks").
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from everstep.errors import EverstepError, ExitCode, UsageError

LIMIT_S = 5.0
"""For each path, as NVRx has it."""
BLOCK_BYTES = 4096
MOUNTS, LUSTRE = "/proc/mounts", "/sys/fs/lustre/health_check"
DISTRIBUTED = ("nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs", "wekafs")


class UnfitNode(EverstepError):
    """This node does not reach what it must; the job may run on another."""

    exit_code = ExitCode.BAD_NODE


def paths_of(text: str | None) -> list[str]:
    """Read a list of absolute paths, separated by commas. Raises UsageError."""
    found = [part.strip() for part in (text or "").split(",") if part.strip()]
    wrong = [path for path in found if not path.startswith("/")]
    if wrong:
        raise UsageError(f"--ft-storage-health-check-path {wrong[0]}: give absolute paths, separated by commas.")
    return found


def mounts(table: str = MOUNTS) -> list[str]:
    """Return where distributed file systems are mounted on this node."""
    with open(table, errors="replace") as lines:
        rows = [line.split() for line in lines]
    return [row[1].replace("\\040", " ") for row in rows if row[2:3] and row[2] in DISTRIBUTED]


def require(paths: Sequence[str], *, distributed: bool, limit_s: float = LIMIT_S) -> None:
    """Look at each path, and at all mounts if `distributed`; UnfitNode where one is not fit, or does not answer."""
    looked_at = [*paths, *(mounts() if distributed else ())]
    if distributed and os.path.exists(LUSTRE):
        looked_at.append(LUSTRE)
    if not looked_at:
        return
    command = [sys.executable, "-m", __name__, *looked_at]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        told, _ = child.communicate(timeout=limit_s * len(looked_at))
    except subprocess.TimeoutExpired:
        child.kill()  # perhaps in vain: it may wait inside the kernel
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        child.stdout.close()
        told = f"{', '.join(looked_at)}: no answer within {limit_s * len(looked_at):g} s\n"
    if told or child.returncode:
        first = told.strip().replace("\n", "; ") or f"the look at {', '.join(looked_at)} ended with {child.returncode}"
        raise UnfitNode(f"this node is not fit for the job: {first}. Mend that, or start the job on another node.")


def look(path: str) -> str:
    """Return what is wrong with one path, or nothing. Files are read a block of, folders listed, others looked at."""
    try:
        if path == LUSTRE:
            told = Path(path).read_text().strip()
            return "" if told == "healthy" else f"{path} says {told!r}"
        if os.path.isdir(path):
            os.listdir(path)
        elif os.path.isfile(path):
            with open(path, "rb") as file:
                file.read(BLOCK_BYTES)
        else:
            os.stat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def main(paths: Sequence[str]) -> int:
    """Print what is wrong, a line for each path."""
    for text in filter(None, map(look, paths)):
        print(text, flush=True)  # noqa: T201 - the parent reads it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
