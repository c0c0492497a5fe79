"""What checkpoints a place holds, whether they are whole, and the removal of one. No torch.

Listing reads manifests and sizes; verifying reads every byte against its checksum. Nothing is unpickled. A checkpoint
that is damaged is named with its file and the reason; it is never removed for it. One that cannot be read now is not
damaged, and nothing older is taken for it (unreachable.py). A place is a directory or a URL.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.api import DISK, Found, Reading, Storage, Wound, only_unread
from everstep.checkpoint.storage.opening import Opening
from everstep.checkpoint.storage.posix import unread
from everstep.checkpoint.storage.retried import RetriedReading
from everstep.checkpoint.unreachable import NOW, ONCE, Retry, Wearing, is_answer, unreachable, why
from everstep.errors import CheckpointError, UsageError

__all__ = ["TIER", "Found", "Wound", "discard", "listed", "newest", "newest_whole", "only_unread", "scan", "verify"]

TIER = DISK
PIECE = 4 << 20
THREADS = 8  # files read at once: reading and hashing both let go of the interpreter


def scan(directory: str, retry: Retry = ONCE) -> list[Found]:
    """Return all checkpoints in `directory`, newest step first.

    UsageError where there is no such directory, UnreachableStorage where it cannot be listed now.
    """
    return listed(opening.open_storage(directory, retry=retry))


def listed(storage: Storage) -> list[Found]:
    """See `scan`."""
    try:
        return storage.scan()
    except OSError as error:
        if not is_answer(error):
            raise unreachable(storage.directory, f"its listing failed: {why(error)}") from error
        raise UsageError(
            f"{storage.directory} cannot be listed: {error.strerror}; give the directory that --checkpoint-dir named"
        ) from error


def verify(found: Found, retry: Retry = ONCE, through: Opening = opening.reading) -> list[Wound]:
    """Read every byte of a checkpoint; return what is wrong with it, and what could not be read (`Wound.unread`).

    `retry`: how long a read that fails is made again, and who is told as it goes on.
    """
    if found.manifest is None:
        return list(found.wounds)
    wounded = {wound.file for wound in found.wounds}
    left = [(name, fact) for name, fact in found.manifest.files.items() if name not in wounded]
    source = RetriedReading(through(found.path), Wearing(retry))

    def wrong(name: str, fact: FileFact) -> Wound | None:
        return _by_content(source, found.step, name, fact)

    try:
        with ThreadPoolExecutor(max(1, min(THREADS, len(left))), thread_name_prefix="everstep-verify") as pool:
            told = list(pool.map(wrong, *zip(*left, strict=True))) if left else []
    finally:
        source.close()
    return [*found.wounds, *(wound for wound in told if wound is not None)]


def newest(
    found: Iterable[Found], retry: Retry = ONCE, through: Opening = opening.reading
) -> tuple[Found | None, list[Wound]]:
    """Return the newest that verifies in full or cannot be read now, and what is wrong with it and the newer ones.

    One that cannot be read now comes first whatever is older: it may be whole.
    """
    wounds: list[Wound] = []
    for one in found:
        wrong = verify(one, retry, through)
        wounds += wrong
        if not wrong or only_unread(wrong):
            return one, wounds
    return None, wounds


def newest_whole(directory: str) -> tuple[Found | None, list[Wound]]:
    """Return the newest checkpoint that verifies in full, and what is wrong with the newer ones.

    UnreachableStorage where a newer one cannot be read now.
    """
    found, wounds = newest(scan(directory))
    for wound in wounds:
        if found is not None and wound.unread and wound.step == found.step:
            raise unreachable(f"{found.path}/{wound.file}", wound.reason.removeprefix(f"{NOW}: "))
    return found, wounds


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


def _by_content(source: Reading, step: int, name: str, fact: FileFact) -> Wound | None:
    digest, offset = xxhash.xxh3_64(), 0
    piece = memoryview(bytearray(min(PIECE, fact.bytes + 1)))
    try:
        while count := source.read_into(name, piece, offset):
            digest.update(piece[:count])
            offset += count
    except OSError as error:
        if is_answer(error):
            return Wound(step, name, f"cannot be read: {error.strerror or error}")
        return unread(step, name, error)
    if digest.hexdigest() == fact.xxh3:
        return None
    return Wound(step, name, f"has checksum {digest.hexdigest()}, not {fact.xxh3}: its bytes were changed")
