"""What a writer does, order by order: turns held snapshots into a durable checkpoint, and answers for each.

One thing at a time, in the order asked; a full or broken disk is an answer, never the writer's end. No torch here: who
knows DCP's metadata gives `describe`.

    write {save, folder, …} + snapshot      → written {save, bytes, seconds} + fragment  | refused {save, text}
    fragment {save, rank} + fragment        (kept for the merge)
    merge {save, folder}                    → published {save, step, bytes, seconds}     | refused {save, text}
    discard {folder}                        → discarded {folder, text}
    prune {condemn, remove}                 → pruned {condemned, removed, text}
    keep                                    (holds the descriptor that came: the job's lock)
"""

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.checkpoint.core import names, segment
from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.manifest import Fragment
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.publish import Describe, condemn, publish, remove
from everstep.checkpoint.shards import Target, write_shard
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError, EverstepError
from everstep.recovery.link import Link, LinkClosed

SEAL_DEADLINE_S = 30.0
SEAL_POLL_S = 0.005

_MENDS = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: free space there, or keep fewer checkpoints",
    errno.EROFS: "the file system is read-only: mount it for writing, or give another --checkpoint-dir",
    errno.EIO: "the device reports an error: look at the kernel's log before trusting it again",
    errno.EACCES: "give this user the right to write there",
}


class Scribe:
    """Serves one rank. `files` is its only way to the disk; `training` says with what versions the job trains."""

    def __init__(
        self,
        link: Link,
        directory: str,
        rank: int,
        files: FileOps,
        describe: Describe,
        training: Mapping[str, str],
        clock: Clock = SYSTEM,
    ) -> None:
        self._link = link
        self._directory = directory
        self._rank = rank
        self._files = files
        self._describe = describe
        self._training = dict(training)
        self._clock = clock
        self._fragments: dict[str, dict[int, Fragment]] = {}
        self._kept: list[int] = []

    def serve(self) -> None:
        """Answer until the line closes."""
        while self.answer():
            pass

    def answer(self) -> bool:
        """Take one order and answer it; False when the line has closed."""
        handlers = {"write": self._write, "fragment": self._fragment, "merge": self._merge,
                    "discard": self._discard, "prune": self._prune, "keep": self._keep}  # fmt: skip
        try:
            message, fds = self._link.receive()
        except LinkClosed:
            return False
        try:
            handlers[message["kind"]](message, fds)
        except LinkClosed:
            return False
        except (OSError, EverstepError, ValueError) as error:
            self._say({"kind": "refused", "save": message.get("save"), "text": told(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _say(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        self._link.send(message, fds)

    def _path(self, folder: str) -> str:
        if names.staging_of(folder) is None and names.step_of(folder) is None:
            raise ValueError(f"{folder!r} is not the name of a checkpoint")
        return os.path.join(self._directory, folder)

    def _write(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        begun = self._clock.now()
        target = Target(
            message["save"], message["step"], message["epoch"], message["generation"], message["world_size"],
            self._path(message["folder"]),
        )  # fmt: skip
        # Not closed by hand: the traceback of a failed write holds slices of it, and closing would raise over it.
        fragment = self._write_from(memoryview(mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)), target)
        body = fragment.to_bytes()
        fd = os.memfd_create("everstep-fragment", os.MFD_CLOEXEC)
        try:
            os.write(fd, body)
            size = sum(fact.bytes for fact in fragment.files.values())
            answer = {"kind": "written", "save": target.save, "bytes": size, "seconds": self._clock.now() - begun}
            self._say(answer, [fd])
        finally:
            os.close(fd)

    def _write_from(self, buffer: memoryview, target: Target) -> Fragment:
        header = self._sealed(buffer, target)
        with buffer[header.meta_offset : header.meta_offset + header.meta_bytes] as meta:
            description = bytes(meta)
        start = header.payload_offset
        with buffer[start : start + header.payload_bytes] as payload:
            fragment = write_shard(
                self._files, target, Layout.from_json(description), description, payload, self._training
            )
        if _header(buffer, target, self._rank) != header:
            raise CheckpointError(f"the snapshot of step {target.step} was overwritten while it was being written")
        return fragment

    def _sealed(self, buffer: memoryview, target: Target) -> segment.Header:
        """Wait for the seal: a copy from a device may still be under way when its rank goes on."""
        deadline = self._clock.now() + SEAL_DEADLINE_S
        while isinstance(segment.parse(buffer), str) and self._clock.now() < deadline:
            self._clock.sleep(SEAL_POLL_S)
        return _header(buffer, target, self._rank)

    def _fragment(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        size = os.fstat(fds[0]).st_size
        fragment = Fragment.from_bytes(os.pread(fds[0], size, 0))
        self._fragments.setdefault(message["save"], {})[message["rank"]] = fragment

    def _merge(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        begun = self._clock.now()
        fragments = self._fragments.pop(message["save"], {})
        self._fragments.clear()  # of saves that never came to a merge
        manifest = publish(
            self._files, self._directory, self._path(message["folder"]), fragments.values(), self._describe
        )
        answer = {"kind": "published", "save": message["save"], "step": manifest.step, "bytes": manifest.total_bytes}
        self._say(answer | {"seconds": self._clock.now() - begun})

    def _discard(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        text = self._gone(message["folder"])
        self._say({"kind": "discarded", "folder": message["folder"], "text": text})

    def _gone(self, folder: str) -> str:
        """Remove a directory of ours; return why it is still there, or nothing."""
        try:
            strange = remove(self._files, self._path(folder))
            self._files.fsync_dir(self._directory)
        except FileNotFoundError:
            return ""  # another writer was faster
        except OSError as error:
            return f"{folder} could not be removed: {told(error)}"
        return f"{folder} stays: it holds {', '.join(strange)}, which is not ours" if strange else ""

    def _prune(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        wrong: list[str] = []
        for folder in message["condemn"]:
            try:
                condemn(self._files, self._path(folder))
            except FileNotFoundError:
                continue  # removed by hand meanwhile
            except OSError as error:
                wrong.append(f"{folder} could not be given up: {told(error)}")
        wrong += [text for folder in message["remove"] if (text := self._gone(folder))]
        answer = {"kind": "pruned", "condemned": message["condemn"], "removed": message["remove"]}
        self._say(answer | {"text": "; ".join(wrong)})

    def _keep(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        self._kept += [os.dup(fd) for fd in fds]


def _header(buffer: memoryview, target: Target, rank: int) -> segment.Header:
    header = segment.parse(buffer)
    if isinstance(header, str):
        raise CheckpointError(f"the snapshot of step {target.step} cannot be written, it is {header}")
    expected = (target.step, target.epoch, target.generation, rank, target.world_size)
    found = (header.step, header.epoch, header.generation, header.rank, header.world_size)
    if found != expected:
        raise CheckpointError(
            f"the buffer holds step, epoch, generation, rank, world {found}, where the save wants {expected}"
        )
    return header


def told(error: Exception) -> str:
    """Say what went wrong, and what mends it where that is known."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    name = f"{error.filename}: " if error.filename else ""
    code = errno.errorcode.get(error.errno, str(error.errno))
    mend = _MENDS.get(error.errno)
    return f"{name}{os.strerror(error.errno)} ({code})" + (f"; {mend}" if mend else "")
