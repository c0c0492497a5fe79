"""Whether the node can hold the snapshots, decided before a byte is allocated, with the sentence that says so.

Rule 1: memory is allocated in full or refused: a mapping that turns out too large at its first touch is a SIGBUS,
    which Python cannot catch (CASES CS-13).
Rule 2: the limits are what the kernel calls available, what the control group leaves, and the operator's cap on all
    snapshots of this node; a sixteenth of the first two stays free for everything else.
Rule 3: the whole node's need is judged when the first rank asks, so that no rank is refused after others were served.
"""

import re
from dataclasses import dataclass

from everstep.errors import UsageError

_RESERVE = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES = _DECIMAL | {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Memory:
    """What the node has to give."""

    available: int  # MemAvailable
    group_free: int | None = None  # what the control group still allows; None: no limit
    group: str = ""

    @property
    def free(self) -> int:
        """What can be had: a control group may leave less than the machine has."""
        return self.available if self.group_free is None else min(self.available, self.group_free)


@dataclass(frozen=True, slots=True)
class Need:
    """What the ranks of this node ask for."""

    ranks: int
    buffers: int
    buffer_bytes: int
    missing: int  # of all that, what is not allocated yet
    held: int  # what snapshots hold now

    def __str__(self) -> str:
        total = self.ranks * self.buffers * self.buffer_bytes
        return f"{size(total)} ({self.buffers} buffers of {size(self.buffer_bytes)} for each of {self.ranks} ranks)"


def size(count: int) -> str:
    """Return a number of bytes for people: 1536 → 1.5 KiB."""
    value, unit = float(count), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def bytes_of(text: str) -> int:
    """Read `8GB`, `512MiB` or a plain number of bytes; UsageError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _BYTES:
        raise UsageError(f"{text!r} is not an amount of memory; write for example 512MiB or 8GB.")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def room(memory: Memory, held: int, cap: int | None) -> int:
    """Return how many bytes of snapshots may come to those that are held; never less than none."""
    limits = [memory.available - memory.available // _RESERVE]
    if memory.group_free is not None:
        limits.append(memory.group_free - memory.group_free // _RESERVE)
    if cap is not None:
        limits.append(cap - held)
    return max(0, min(limits))


def shortage(need: Need, memory: Memory, cap: int | None) -> str | None:
    """Return why `need` does not fit and what to change, or None where it does."""
    limits = [(memory.available - memory.available // _RESERVE, "this machine has available", _GROW_NODE)]
    if memory.group_free is not None:
        free = memory.group_free - memory.group_free // _RESERVE
        limits.append((free, f"the memory limit of its control group {memory.group} leaves", _GROW_GROUP))
    if cap is not None:
        limits.append((cap - need.held, "--snapshot-memory leaves", _GROW_CAP))
    free, what, mend = min(limits, key=lambda limit: limit[0])
    if need.missing <= free:
        return None
    return (
        f"the snapshots of this node need {need}, of which {size(need.missing)} are still to be allocated, but {what} "
        f"{size(max(free, 0))}. {mend}, or shard the state over more ranks (fully_shard), or train without snapshots "
        "in memory."
    )


_GROW_NODE = "Use a machine with more memory, or end what else runs on it"
_GROW_GROUP = "Raise the container's memory limit"
_GROW_CAP = "Raise --snapshot-memory (where no agent runs, EVERSTEP_SNAPSHOT_MEMORY)"
