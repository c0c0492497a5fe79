"""What checkpoints a place holds, whether they are whole, and the removal of one. No torch.

Listing reads manifests and sizes; verifying reads every byte against its checksum. Nothing is unpickled. A checkpoint
that is damaged is named with its file and the reason; it is never removed for it. A place is a directory or a URL.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.api import DISK, Found, Reading, Wound
from everstep.errors import CheckpointError, UsageError

__all__ = ["TIER", "Found", "Wound", "discard", "newest_whole", "scan", "verify"]

TIER = DISK
PIECE = 4 << 20
THREADS = 8  # files read at once: reading and hashing both let go of the interpreter


def scan(directory: str) -> list[Found]:
    """Return all checkpoints in `directory`, newest step first. UsageError where it cannot be listed."""
    try:
        return opening.open_storage(directory).scan()
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be listed: {error.strerror}; give the directory that --checkpoint-dir named"
        ) from error


def verify(found: Found, moving: Callable[[], None] = lambda: None) -> list[Wound]:
    """Read every byte of a checkpoint; return what is wrong with it. `moving` is called as it goes on."""
    if found.manifest is None:
        return list(found.wounds)
    wounded = {wound.file for wound in found.wounds}
    left = [(name, fact) for name, fact in found.manifest.files.items() if name not in wounded]
    source = opening.reading(found.path)

    def wrong(name: str, fact: FileFact) -> str | None:
        return _by_content(source, name, fact, moving)

    try:
        with ThreadPoolExecutor(max(1, min(THREADS, len(left))), thread_name_prefix="everstep-verify") as pool:
            reasons = list(pool.map(wrong, *zip(*left, strict=True))) if left else []
    finally:
        source.close()
    told = zip(left, reasons, strict=True)
    return [*found.wounds, *(Wound(found.step, name, reason) for (name, _), reason in told if reason)]


def newest_whole(
    directory: str, *, without: Iterable[int] = (), moving: Callable[[], None] = lambda: None
) -> tuple[Found | None, list[Wound]]:
    """Return the newest checkpoint that verifies in full, and what is wrong with the newer ones."""
    wounds: list[Wound] = []
    for found in scan(directory):
        if found.step in set(without):
            continue
        wrong = verify(found, moving)
        if not wrong:
            return found, wounds
        wounds += wrong
    return None, wounds


def discard(directory: str, step: int, files: FileOps | None = None) -> None:
    """Remove the checkpoint of `step` by the user's order: metadata first, then data."""
    storage = opening.open_storage(directory, files)
    name = names.committed(step)
    path = storage.folder(name)
    try:
        if not any(found.step == step for found in storage.scan()):
            raise UsageError(f"{path} is no checkpoint of Everstep's; remove it by hand if it is to go")
        storage.condemn(name)
        strange = storage.remove(name)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error.strerror}") from error
    if strange:
        raise CheckpointError(f"{path} stays, because it holds {', '.join(strange)}, which Everstep did not write")


def _by_content(source: Reading, name: str, fact: FileFact, moving: Callable[[], None]) -> str | None:
    digest, offset = xxhash.xxh3_64(), 0
    piece = memoryview(bytearray(min(PIECE, fact.bytes + 1)))
    try:
        while count := source.read_into(name, piece, offset):
            digest.update(piece[:count])
            offset += count
            moving()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if digest.hexdigest() == fact.xxh3:
        return None
    return f"has checksum {digest.hexdigest()}, not {fact.xxh3}: its bytes were changed"
