"""What the trial of a checkpoint directory means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.core.budget import size
from everstep.checkpoint.core.retention import DEFAULT_KEEP
from everstep.doctor.core.findings import Finding, ok, problem, warning

FEW_FILES = 10_000
_WHAT, _SPACE = "checkpoint directory", "space for checkpoints"


@dataclass(frozen=True, slots=True)
class Disk:
    """What a child has seen. `trouble` is of the child itself: its time was over, and in what."""

    directory: str
    trouble: str = ""
    refused: str = ""  # why a claim of it was refused
    unlocked: bool = False  # a second claim was granted beside the first
    replaced: bool = False  # a directory was renamed over one that holds something
    tried_in: str = ""
    free: int | None = None  # bytes
    files: int | None = None  # more files; None: the file system has no such limit

    @classmethod
    def from_facts(cls, directory: str, facts: Mapping[str, Any], trouble: str) -> "Disk":
        """Read what the child said; what it did not say is unknown."""
        return cls(
            directory,
            trouble,
            refused=str(facts.get("refused", "")),
            unlocked=bool(facts.get("unlocked")),
            replaced=bool(facts.get("replaced")),
            tried_in=str(facts.get("tried_in", "")),
            free=facts.get("free"),
            files=facts.get("files"),
        )


def judge(seen: Disk, state: int | None, ranks: int) -> list[Finding]:
    """Return what it means for a state of which this node's `ranks` ranks hold `state` bytes together."""
    return [_fit(seen), *_space(seen, state, ranks)]


def elsewhere(place: str) -> Finding:
    """A store that is no directory is not tried."""
    mend = "The job claims it before its first step, and is refused with words where that fails."
    return warning(_WHAT, f"{place} is no directory: it was not tried", "a directory", mend)


def _fit(seen: Disk) -> Finding:
    if seen.trouble:
        mend = "Look at the mount (`stat`, `dmesg`): a server that is away holds whoever touches it."
        return problem(_WHAT, f"{seen.directory}: {seen.trouble}", "an answer", mend)
    if seen.refused:
        return problem(
            _WHAT, seen.refused, "a directory that a job can claim", "Do what it says, as a job would have to."
        )
    if seen.unlocked:
        mend = "Mount it with locks (NFS: without nolock; Lustre: with flock), or give another directory."
        text = f"{seen.directory}: a lock that is held was granted again"
        return problem(_WHAT, text, "flock that holds: two jobs would take each other's checkpoints for theirs", mend)
    if seen.replaced:
        text = f"{seen.directory}: a directory was renamed over one that holds files"
        return problem(
            _WHAT, text, "a rename that refuses it, as POSIX says", "Give a directory on another file system."
        )
    return ok(_WHAT, f"{seen.directory}: create, sync, rename, list and lock work (tried in {seen.tried_in})")


def _space(seen: Disk, state: int | None, ranks: int) -> list[Finding]:
    if seen.free is None:
        return []
    found = [_bytes(seen.free, state, ranks)]
    if seen.files is not None and seen.files < FEW_FILES:
        found.append(warning(_SPACE, f"{seen.files} more files", f"{FEW_FILES}", "Free inodes, or raise the quota."))
    return found


def _bytes(free: int, state: int | None, ranks: int) -> Finding:
    """Under DDP one rank's copy is written, of a sharded state all: which it is, nobody has said."""
    had = f"{size(free)} free"
    if state is None:
        return ok(_SPACE, f"{had}; --state says what is needed")
    times = f"{DEFAULT_KEEP} checkpoints that are kept and one that is written"
    mend = "Free some space, or keep fewer (--checkpoint-keep)."
    one, every = -(-state // ranks) * (DEFAULT_KEEP + 1), state * (DEFAULT_KEEP + 1)
    if free < one:
        return problem(_SPACE, had, f"{size(one)} at the least, for one rank's part of {times}", mend)
    if free < every:
        return warning(_SPACE, had, f"{size(every)} where the state is sharded, for this node's part of {times}", mend)
    return ok(_SPACE, f"{had}; this node's part of {times} needs {size(every)} at most")
