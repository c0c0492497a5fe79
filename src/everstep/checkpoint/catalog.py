"""What checkpoints a directory holds, whether they are whole, and the removal of one. No torch.

Listing reads manifests and sizes; verifying reads every byte against its checksum. Nothing is unpickled. A checkpoint
that is damaged is named with its file and the reason; it is never removed for it.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact, Manifest
from everstep.checkpoint.fileops import FileOps, PosixFiles
from everstep.checkpoint.publish import condemn, read_manifest, remove
from everstep.errors import CheckpointError, DamagedCheckpoint, UsageError

TIER = "disk"
PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Wound:
    """Why a checkpoint is not whole."""

    step: int
    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.step} {self.file} {self.reason}"


@dataclass(frozen=True, slots=True)
class Found:
    """A directory with a checkpoint's name. `manifest` is None where none can be trusted."""

    step: int
    path: str
    manifest: Manifest | None
    wounds: tuple[Wound, ...]
    changed_s: float  # wall time of its last change

    @property
    def complete(self) -> bool:
        """True when manifest and sizes agree; `verify` also reads the content."""
        return self.manifest is not None and not self.wounds

    def row(self, now_s: float) -> dict[str, object]:
        """Return what `ls --json` prints."""
        size = self.manifest.total_bytes if self.manifest else sum(_sizes(self.path))
        return {
            "step": self.step, "path": self.path, "complete": self.complete, "tier": TIER, "bytes": size,
            "world_size": self.manifest.world_size if self.manifest else None,
            "age_s": round(max(0.0, now_s - self.changed_s), 3),
        }  # fmt: skip


def scan(directory: str) -> list[Found]:
    """Return all checkpoints in `directory`, newest step first. UsageError where there is no such directory."""
    try:
        inside = os.listdir(directory)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be listed: {error.strerror}; give the directory that --checkpoint-dir named"
        ) from error
    steps = sorted((step for name in inside if (step := names.step_of(name)) is not None), reverse=True)
    found = (look(os.path.join(directory, names.committed(step)), step) for step in steps)
    return [one for one in found if one is not None]


def look(path: str, step: int) -> Found | None:
    """Look at one checkpoint without reading its data; None where there is no directory, or somebody else's."""
    try:
        changed = os.stat(path).st_mtime
        inside = os.listdir(path)
    except OSError:
        return None
    if names.CONDEMNED in inside or not any(names.OURS_INSIDE.match(name) for name in inside):
        return None
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        reason = str(error).removeprefix(f"{os.path.join(path, names.MANIFEST)}: ")
        return Found(step, path, None, (Wound(step, names.MANIFEST, reason),), changed)
    wounds = tuple(Wound(step, name, why) for name, why in _by_size(path, manifest))
    return Found(step, path, manifest, wounds, changed)


def verify(found: Found) -> list[Wound]:
    """Read every byte of a checkpoint; return what is wrong with it."""
    if found.manifest is None:
        return list(found.wounds)
    sizes = {wound.file for wound in found.wounds}
    wounds = list(found.wounds)
    for name, fact in found.manifest.files.items():
        reason = None if name in sizes else _by_content(os.path.join(found.path, name), fact)
        if reason:
            wounds.append(Wound(found.step, name, reason))
    return wounds


def newest_whole(directory: str, *, without: Iterable[int] = ()) -> tuple[Found | None, list[Wound]]:
    """Return the newest checkpoint that verifies in full, and what is wrong with the newer ones."""
    wounds: list[Wound] = []
    for found in scan(directory):
        if found.step in set(without):
            continue
        wrong = verify(found)
        if not wrong:
            return found, wounds
        wounds += wrong
    return None, wounds


def discard(directory: str, step: int, files: FileOps | None = None) -> None:
    """Remove the checkpoint of `step` by the user's order: metadata first, then data."""
    ops = files or PosixFiles()
    path = os.path.join(directory, names.committed(step))
    try:
        inside = ops.listdir(path)
        if not {names.MANIFEST, names.CONDEMNED} & set(inside):
            raise UsageError(f"{path} is no checkpoint of Everstep's; remove it by hand if it is to go")
        condemn(ops, path)
        strange = remove(ops, path)
        ops.fsync_dir(directory)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error.strerror}") from error
    if strange:
        raise CheckpointError(f"{path} stays, because it holds {', '.join(strange)}, which Everstep did not write")


def _by_size(path: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    for name, fact in manifest.files.items():
        where = os.path.join(path, name)
        try:
            size = os.stat(where).st_size if os.path.isfile(where) else None
        except OSError as error:
            yield name, f"cannot be read: {error.strerror}"
            continue
        if size is None:
            yield name, f"is missing; {fact.bytes} bytes expected"
        elif size != fact.bytes:
            yield name, f"has {size} bytes, not {fact.bytes}: {'cut' if size < fact.bytes else 'longer than written'}"


def _by_content(path: str, fact: FileFact) -> str | None:
    digest = xxhash.xxh3_64()
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if digest.hexdigest() == fact.xxh3:
        return None
    return f"has checksum {digest.hexdigest()}, not {fact.xxh3}: its bytes were changed"


def _sizes(path: str) -> Iterator[int]:
    with os.scandir(path) as entries:
        yield from (entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
