"""Names on disk: what a checkpoint directory contains, and whose it is.

    step-120/                     a committed checkpoint: it has this name or it does not exist
      manifest.json               ours: sizes, checksums, lineage, entries (core/manifest.py)
      .metadata                   DCP's, a pickle, for others
      __0_0.distcp                the shard that rank 0 wrote
      __0_0.layout.json           rank 0's snapshot, described (core/layout.py)
    step-140.0.3.9f3a77c1-7.tmp/  being written: epoch 0, generation 3, seventh attempt of the job 9f3a77c1
    .everstep-9f3a77c1.job        that job's owner file, locked while a process of it lives
    .everstep.series              which training this is: only where a second place belongs to it (series.py)
    .everstep.gate                locked while a job looks whether another one is here

Whatever matches none of these is somebody else's and is never touched.
"""

import re
from dataclasses import dataclass

HIDDEN = ".everstep"
"""How the names of all files of ours begin that lie beside checkpoints."""
GATE = ".everstep.gate"
SERIES = ".everstep.series"
MANIFEST = "manifest.json"
CONDEMNED = "manifest.condemned.json"
METADATA = ".metadata"
STEP = re.compile(r"step-(0|[1-9]\d{0,17})\Z")
STAGING = re.compile(r"step-(\d+)\.(\d+)\.(\d+)\.([0-9a-f]{8})-(\d+)\.tmp\Z")
OWNER = re.compile(r"\.everstep-([0-9a-f]{8})\.job\Z")
PROBE = re.compile(r"\.everstep-probe-([0-9a-f]{8})(\.done)?\Z")
OURS_INSIDE = re.compile(r"(__\d+_\d+\.(distcp|layout\.json)|\.metadata|manifest(\.condemned)?\.json)\Z")
"""Files that we write into a checkpoint: the only ones that are removed with it."""


@dataclass(frozen=True, slots=True)
class Staging:
    """What the name of a directory that is being written says."""

    step: int
    epoch: int
    generation: int
    job: str
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step}.{self.epoch}.{self.generation}.{self.job}-{self.attempt}.tmp"


def committed(step: int) -> str:
    """Name of the committed checkpoint of `step`."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a committed checkpoint's name; None for any other name."""
    match = STEP.match(name)
    return int(match[1]) if match else None


def staging_of(name: str) -> Staging | None:
    """Read what `str` of a Staging prints; None for any other name."""
    match = STAGING.match(name)
    return Staging(int(match[1]), int(match[2]), int(match[3]), match[4], int(match[5])) if match else None


def probe(job: str) -> str:
    """Name of a file with which a place is tried."""
    return f".everstep-probe-{job}"


def owner(job: str) -> str:
    """Name of a job's owner file."""
    return f".everstep-{job}.job"


def owner_of(name: str) -> str | None:
    """The job of an owner file's name; None for any other name."""
    match = OWNER.match(name)
    return match[1] if match else None


def shard(rank: int) -> str:
    """Name of the file that the writer of `rank` fills."""
    return f"__{rank}_0.distcp"


def layout(rank: int) -> str:
    """Name of the file that describes the snapshot of `rank`."""
    return f"__{rank}_0.layout.json"
