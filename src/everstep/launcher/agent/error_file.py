"""The file in which whoever started us wants to read why the job failed: TORCHELASTIC_ERROR_FILE of our own.

As torchrun's `main`, which torch's `@record` wraps: what the first rank to fail has written into its own error file is
handed on, with its exit code; where it has written none, our own words stand in that form.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.clock import SYSTEM
from everstep.recovery.core.words import Fault, Incarnation
from everstep.telemetry import say


def hand_on(files: Mapping[Incarnation, str], causes: Sequence[Fault], code: int, reason: str) -> None:
    """Write it, and say where the rank's own lies; `files`: each worker's. Nothing for a job that has not failed."""
    if code == 0:
        return
    last = causes[-1].incarnation if causes else None
    found = _read(files.get(last, "") if last is not None else "")
    if found and last is not None:
        say(f"what the rank has recorded: {files[last]}")
    target = environ.get("TORCHELASTIC_ERROR_FILE")
    if not target:
        return
    try:
        Path(target).write_text(json.dumps(_with_code(found, code) or _of_ours(code, reason)))
    except OSError as error:
        say(f"TORCHELASTIC_ERROR_FILE {target} cannot be written: {error.strerror}")


def _read(path: str) -> dict[str, Any]:
    """Return what a worker has written, or nothing; it is the user's process, which may write anything."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(Path(path).read_text()) if path else None
        if isinstance(found, dict):
            return found  # pyright: ignore[reportUnknownVariableType]  # any JSON
    return {}


def _with_code(found: dict[str, Any], code: int) -> dict[str, Any]:
    if isinstance(found.get("message"), dict):
        return found | {"message": found["message"] | {"errorCode": code}}
    return found


def _of_ours(code: int, reason: str) -> dict[str, Any]:
    told = {"py_callstack": "", "timestamp": str(int(SYSTEM.wall()))}
    return {"message": {"message": reason, "errorCode": code, "extraInfo": told}}
