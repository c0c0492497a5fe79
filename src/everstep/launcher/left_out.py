"""Nodes that are left out of a job, remembered in its run folder: a job that is taken up there leaves them out again.

One file for each host name, below the folder that `--run-dir` (or EVERSTEP_RUN_DIR) names, on a disk that all nodes
share or on each node's own. Whoever removes it lets the node in again.
"""

import json
from pathlib import Path

FOLDER = "left-out"


def remember(base: Path, host: str, why: str, wall_s: float) -> None:
    """Write it down. Raises OSError."""
    folder = base / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{host}.json.new"
    new.write_text(json.dumps({"host": host, "why": why, "wall_s": wall_s}) + "\n")
    new.replace(folder / f"{host}.json")


def why(base: Path, host: str) -> str:
    """Return why a host is left out, with what lets it in again; empty where it is not."""
    path = base / FOLDER / f"{host}.json"
    try:
        text = path.read_text()
    except OSError:
        return ""
    try:
        told = str(json.loads(text)["why"])
    except (ValueError, KeyError, TypeError):
        told = "nobody can read why"
    return f"this node ({host}) was left out of this job: {told}. Remove {path} to let it in again."
