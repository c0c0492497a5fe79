"""NCCL's Flight Recorder: what each rank's groups had under way, written down before they are aborted.

Torch keeps the records in memory where a buffer is asked for (`TORCH_FR_BUFFER_SIZE`; in older versions
`TORCH_NCCL_TRACE_BUFFER_SIZE`) and reads them with `torchfrtrace FOLDER`. NVRx's `AbortTorchDistributed` writes them
under `torch_fr_trace_path` or `NVRX_FR_TRACE_PATH`, one folder for each iteration.

Rule 1: before the abort: it ends the entries that tell who waited in what.
Rule 2: no Python stacks unless asked for: torch takes the interpreter lock for them, and a rank that holds it is the
        very rank that hangs.
Rule 3: a trace that cannot be written costs the trace, never the restart.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from everstep import environ
from everstep.inprocess.items import Absent, find

PATH = "NVRX_FR_TRACE_PATH"
BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
STACKS = "TORCH_INCLUDE_STACK_TRACE"
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")


def wanted(path: str | None = None) -> Path | None:
    """Return the folder for traces: `path`, else NVRX_FR_TRACE_PATH; None where nobody asks or nothing records."""
    folder = path or environ.get(PATH)
    if not folder or not any(_positive(environ.get(name)) for name in BUFFERS):
        return None
    return Path(folder)


def write(rank: int, iteration: int, path: str | None = None) -> Path | None:
    """Write this rank's records to `PATH/iter_ITERATION/nccl_trace_rank_RANK`; return the file, None where no one asks.

    Any thread, before the abort; some milliseconds. Raises OSError where the folder takes no file.
    """
    folder, dump = wanted(path), _dump()
    if folder is None or dump is None:
        return None
    records = dump(True, (environ.get(STACKS) or "").lower() in ("1", "true"), False)
    file = folder / f"iter_{iteration}" / f"nccl_trace_rank_{rank}"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(records)
    part.replace(file)  # a reader sees a whole trace or none
    return file


def _dump() -> Callable[[bool, bool, bool], bytes] | None:
    """Return torch's own dump, by whichever name this version has it (a build without NCCL may have none)."""
    for name in _DUMPS:
        try:
            found: Callable[[bool, bool, bool], bytes] = find(torch, f"_C._distributed_c10d.{name}")
        except Absent:
            continue
        return found
    return None


def _positive(text: str | None) -> bool:
    return text is not None and text.strip().isdigit() and int(text) > 0
