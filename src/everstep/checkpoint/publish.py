"""Gives a written checkpoint its name, and takes names and data away again. Each order below is the mechanism.

Publishing: `.metadata` and the manifest are written and fsynced, then the directory, then one rename makes all of it
`step-N`, then the parent is fsynced. Before the rename nothing has that name, after it all is there.
Removing: the manifest first, so that it is no checkpoint any more, then `.metadata`; data later (EXPERIMENTS C10). Only
files that we write are removed: a directory that holds anything else stays, with that in it.
"""

import os
from collections.abc import Callable, Iterable, Mapping

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import FileFact, Fragment, Manifest, checksum, merge
from everstep.checkpoint.fileops import FileOps, put
from everstep.checkpoint.unreachable import failure
from everstep.errors import CheckpointError, DamagedCheckpoint

Describe = Callable[[Manifest], bytes]


def publish(
    files: FileOps,
    directory: str,
    folder: str,
    fragments: Iterable[Fragment],
    describe: Describe,
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Merge, and make `folder` the checkpoint of its step in `directory`. Again after a merger's death: no harm."""
    manifest = merge(fragments).with_metrics(metrics or {})
    metadata = describe(manifest)
    manifest = manifest.with_file(names.METADATA, FileFact(len(metadata), checksum(metadata)))
    content = manifest.to_bytes()
    target = os.path.join(directory, names.committed(manifest.step))
    inside = _listed(files, folder)
    present = _content(os.path.join(target, names.MANIFEST))
    if inside is None or present == content:
        published = _already(present, manifest, target, folder)
        files.fsync_dir(directory)
        return published
    for name, part in ((names.METADATA, metadata), (names.MANIFEST, content)):
        if name in inside:
            files.unlink(os.path.join(folder, name))  # a merger that died here left it, whole or not
        try:
            put(files, os.path.join(folder, name), part)
        except FileExistsError:  # it died on another node, and the listing was an old one
            files.unlink(os.path.join(folder, name))
            put(files, os.path.join(folder, name), part)
    files.fsync_dir(folder)
    replaced = _take_name(files, folder, target)
    files.fsync_dir(directory)
    if replaced:
        remove(files, folder)
    return manifest


def _listed(files: FileOps, folder: str) -> list[str] | None:
    try:
        return files.listdir(folder)
    except FileNotFoundError:
        return None


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _already(present: bytes | None, manifest: Manifest, target: str, folder: str) -> Manifest:
    """The merger before us came so far: of one save there is one checkpoint, whatever was measured beside it since."""
    try:
        published = None if present is None else Manifest.from_bytes(present)
    except DamagedCheckpoint:
        published = None
    if published is None or published.save != manifest.save:
        raise CheckpointError(
            f"{folder} is gone before it was published, and {target} is not its result; somebody removed it. "
            "The next save begins afresh."
        )
    return published


def _take_name(files: FileOps, folder: str, target: str) -> bool:
    """Rename; True when an older checkpoint of ours had the name and now stands under `folder`'s."""
    if not os.path.lexists(target):
        files.rename(folder, target)
        return False
    known = {names.MANIFEST, names.CONDEMNED}
    if not os.path.isdir(target) or os.path.islink(target) or not known & set(files.listdir(target)):
        raise CheckpointError(
            f"{target} exists and is no checkpoint of Everstep's, so it is left alone and the save cannot take its "
            "name; move it away, or give another --checkpoint-dir"
        )
    files.exchange(folder, target)
    return True


def condemn(files: FileOps, path: str) -> None:
    """Make a committed checkpoint none, leaving its data to readers that have begun."""
    inside = files.listdir(path)
    if names.MANIFEST in inside:
        files.rename(os.path.join(path, names.MANIFEST), os.path.join(path, names.CONDEMNED))
    if names.METADATA in inside:
        files.unlink(os.path.join(path, names.METADATA))
    files.fsync_dir(path)


def remove(files: FileOps, path: str) -> list[str]:
    """Remove a condemned checkpoint, or one that was never published; return what is not ours and so stays."""
    inside = files.listdir(path)
    last = [name for name in (names.MANIFEST, names.CONDEMNED) if name in inside]
    if names.MANIFEST in last:
        condemn(files, path)
        inside, last = files.listdir(path), [names.CONDEMNED]
    for name in [n for n in inside if names.OURS_INSIDE.match(n) and n not in last]:
        files.unlink(os.path.join(path, name))
    strange = [n for n in inside if not names.OURS_INSIDE.match(n)]
    if strange:
        return strange
    for name in last:
        files.unlink(os.path.join(path, name))
    files.rmdir(path)
    return []


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the checkpoint at `path`. Raises DamagedCheckpoint that names the file and the reason."""
    where = os.path.join(path, names.MANIFEST)

    def content() -> bytes:
        with open(where, "rb") as file:
            return file.read()

    return parsed(where, content, names.step_of(os.path.basename(path.rstrip("/"))))


def parsed(where: str, content: Callable[[], bytes], step: int | None) -> Manifest:
    """Return the manifest that `content` reads at `where`.

    DamagedCheckpoint where it is none, or of another step; UnreachableStorage where it cannot be read now.
    """
    try:
        manifest = Manifest.from_bytes(content())
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{where}: {error}") from error
    except OSError as error:
        raise failure(where, error) from error
    if step is not None and step != manifest.step:
        raise DamagedCheckpoint(f"{where}: it is of step {manifest.step}, not {step}; a directory was renamed")
    return manifest
