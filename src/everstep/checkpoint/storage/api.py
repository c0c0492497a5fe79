"""What writers, a job's holder, readers and commands ask of a place where checkpoints lie.

    writers    files, folder → write_shard;  publish, condemn, remove
    a holder   claim → take … close;  go_on … close, on the node that succeeds
    readers    scan → Found;  reading → manifest, size, read_into

Rule 1: publishing is one atomic create: before it there is no checkpoint of that step, after it all of it is there.
Rule 2: what was written is not changed: data belong to one save, and go when its checkpoint has gone.
Rule 3: whatever is not ours stays, and is named where it is in the way.
All errors are OSError, or ours, with the path. `everstep.testing.storage_rules` examines every implementation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from everstep.checkpoint.core.manifest import Fragment, Manifest
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.publish import Describe

DISK, OBJECTS = "disk", "object"


@dataclass(frozen=True, slots=True)
class Wound:
    """Why a checkpoint is not whole; or, `unread`, why nobody can tell now whether it is."""

    step: int
    file: str
    reason: str
    unread: bool = False

    def __str__(self) -> str:
        return f"{self.step} {self.file} {self.reason}"


@dataclass(frozen=True, slots=True)
class Found:
    """What has a checkpoint's name. `manifest` is None where none can be trusted."""

    step: int
    path: str
    manifest: Manifest | None
    wounds: tuple[Wound, ...]
    changed_s: float  # wall time of its last change
    bytes: int  # as they lie there
    tier: str = DISK

    @property
    def complete(self) -> bool:
        """True when manifest and sizes agree; `catalog.verify` also reads the content."""
        return self.manifest is not None and not self.wounds

    @property
    def unread(self) -> bool:
        """True where nothing is known to be wrong with it, and not all could be looked at."""
        return only_unread(self.wounds)

    def row(self, now_s: float) -> dict[str, object]:
        """Return what `ls --json` prints."""
        return {
            "step": self.step, "path": self.path, "complete": self.complete, "tier": self.tier,
            "bytes": self.manifest.total_bytes if self.manifest else self.bytes,
            "world_size": self.manifest.world_size if self.manifest else None,
            "age_s": round(max(0.0, now_s - self.changed_s), 3) if self.changed_s else None,
        }  # fmt: skip


def only_unread(wounds: Iterable[Wound]) -> bool:
    """True where there is no wound among them, and something that could not be read."""
    found = list(wounds)
    return bool(found) and all(wound.unread for wound in found)


class Reading(Protocol):
    """One checkpoint as it is read. Any thread. Errors are OSError; FileNotFoundError for what is not there.

    An error that says so says it of the file: where the place itself is away, it is another (`unreachable.is_answer`).
    """

    def manifest(self) -> bytes:
        """Return the content of its manifest."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of one of its files; None where there is no such file."""
        ...

    def read_into(self, name: str, into: memoryview, offset: int) -> int:
        """Read some bytes of a file from `offset`; return how many: 0 at its end."""
        ...

    def close(self) -> None:
        """Let go of it; twice does no harm."""
        ...


class Claiming(Protocol):
    """A job's claim on the place, from `take` to `close`."""

    over: bool
    """Whether `close` gives it up for the whole job; else others of the job go on, and the next start finds it."""

    @property
    def lock(self) -> str:
        """What each writer holds too; nothing where a claim is not held by processes."""
        ...

    def take(self, run: str) -> list[str]:
        """Try the place, claim it, sweep leftovers of the dead; return sentences. ConfigurationError: it cannot be."""
        ...

    def go_on(self, job: str, run: str) -> None:
        """Hold it in the stead of another node of `job`, which took it and is gone. Never waits for the place."""
        ...

    def close(self) -> None:
        """Give the claim up."""
        ...


class Storage(Protocol):
    """A place where checkpoints lie."""

    directory: str
    """Absolute path, or URL."""

    @property
    def files(self) -> FileOps:
        """What a writer writes a save's files with, below `folder`."""
        ...

    def folder(self, name: str) -> str:
        """Where a save's files go, or a checkpoint is; `name` as core/names.py has them."""
        ...

    def publish(
        self, folder: str, fragments: Iterable[Fragment], describe: Describe, metrics: Mapping[str, float] | None = None
    ) -> Manifest:
        """Make the save that was written as `folder` (a name) the checkpoint of its step. Again: no harm."""
        ...

    def condemn(self, name: str) -> None:
        """Make a checkpoint none, and leave its data to readers that have begun. FileNotFoundError: it is gone."""
        ...

    def remove(self, name: str) -> list[str]:
        """Remove a save or checkpoint, and its data; return what is not ours and so stays."""
        ...

    def scan(self) -> list[Found]:
        """All checkpoints, newest first, those that cannot be looked at now too. OSError: it cannot be listed."""
        ...

    def reading(self, step: int) -> Reading:
        """Read the checkpoint of `step`."""
        ...
