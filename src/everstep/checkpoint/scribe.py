"""What a writer does, order by order: turns held snapshots into a durable checkpoint, and answers for each.

One thing at a time, in the order asked; a full or broken disk is an answer, never the writer's end. No torch here: who
knows DCP's metadata gives `describe`.

    write {save, folder, …} + snapshot      → written {save, bytes, seconds} + fragment  | refused {save, text}
                                              moving {save}, every `tell_s` while the storage takes something
    fragment {save, rank} + fragment        (kept for the merge)
    merge {save, folder, metrics, visible_s} → published {save, step, bytes, seconds}     | refused {save, text}
    discard {folder}                        → discarded {folder, text}
    prune {condemn, remove}                 → pruned {condemned, removed, text}
    keep {lock}                             (holds the job's lock too, as long as this process lives)
"""

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from everstep.checkpoint.core import names, segment
from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.core.manifest import Fragment, Manifest
from everstep.checkpoint.directory import share
from everstep.checkpoint.fileops import FileOps
from everstep.checkpoint.pace import Paced
from everstep.checkpoint.publish import Describe
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.storage.opening import is_url, open_storage
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError, DamagedCheckpoint, EverstepError
from everstep.recovery.link import Link, LinkClosed

SEAL_DEADLINE_S = 30.0
SEAL_POLL_S = 0.005
VISIBLE_POLL_S = 0.5

_MENDS = {
    errno.ENOSPC: "free space there, keep fewer checkpoints, or give another --checkpoint-dir",
    errno.EDQUOT: "the quota is used up: free space there, keep fewer checkpoints, or give another --checkpoint-dir",
    errno.EROFS: "the file system is read-only: mount it for writing, or give another --checkpoint-dir",
    errno.EIO: "the device reports an error: look at the kernel's log before trusting it again",
    errno.EACCES: "give this user the right to write there",
}


class Scribe:
    """Serves one rank. `files`: its only way to a disk, or None: the machine's own, or a store's.

    `training` says with what versions the job trains.
    """

    def __init__(
        self,
        link: Link,
        directory: str,
        rank: int,
        files: FileOps | None,
        describe: Describe,
        training: Mapping[str, str],
        clock: Clock = SYSTEM,
    ) -> None:
        self._link = link
        self._storage = open_storage(directory, files)
        self._directory = self._storage.directory
        self._rank = rank
        self._files = Paced(self._storage.files, self._moved, clock, syncs=not is_url(self._directory))
        self._describe = describe
        self._training = dict(training)
        self._clock = clock
        self._fragments: dict[str, dict[int, Fragment]] = {}
        self._lock: tuple[str, int] | None = None  # the job's owner file, and our hold on it
        self._telling: tuple[str, float] | None = None  # of which save, how often
        self._told_s = 0.0

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

    def _named(self, folder: str) -> str:
        if names.staging_of(folder) is None and names.step_of(folder) is None:
            raise ValueError(f"{folder!r} is not the name of a checkpoint")
        return folder

    def _moved(self) -> None:
        """The storage has taken something: say so, if that is wanted and was not said just now."""
        now = self._clock.now()
        if self._telling is not None and now - self._told_s >= self._telling[1]:
            self._told_s = now
            self._say({"kind": "moving", "save": self._telling[0]})

    def _write(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        begun = self._told_s = self._clock.now()
        self._check_place()
        self._telling = (message["save"], message["tell_s"]) if "tell_s" in message else None
        target = Target(
            message["save"], message["step"], message["epoch"], message["generation"], message["world_size"],
            self._storage.folder(self._named(message["folder"])),
        )  # fmt: skip
        # Not closed by hand: the traceback of a failed write holds slices of it, and closing would raise over it.
        fragment = self._write_from(memoryview(mmap.mmap(fds[0], 0)), target)
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
        with buffer[start : start + header.payload_bytes] as payload:
            segment.put_checksum(buffer, header, xxhash.xxh3_64_intdigest(payload))
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
        self._check_place()
        fragments = self._fragments.pop(message["save"], {})
        self._fragments.clear()  # of saves that never came to a merge
        folder = self._named(message["folder"])
        if "visible_s" in message and not is_url(self._directory):
            self._see(folder, fragments, float(message["visible_s"]))
        manifest = self._storage.publish(folder, fragments.values(), self._describe, message.get("metrics"))
        answer = {"kind": "published", "save": message["save"], "step": manifest.step, "bytes": manifest.total_bytes}
        self._say(answer | {"seconds": self._clock.now() - begun})

    def _see(self, folder: str, fragments: Mapping[int, Fragment], limit_s: float) -> None:
        """Wait until what other nodes have written is there, by exact name: a network file system may show it late.

        Where whoever merged it before us has published it, it has gone from there.
        """
        files = [(f.rank, name, fact.bytes) for f in fragments.values() for name, fact in f.files.items()]
        deadline, within = self._clock.now() + limit_s, self._storage.folder(folder)
        saves = {fragment.save for fragment in fragments.values()}
        while lacking := [one for one in files if _size(os.path.join(within, one[1])) != one[2]]:
            if self._published(folder) in saves:
                return
            if self._clock.now() >= deadline:
                rank, name, size = lacking[0]
                raise CheckpointError(
                    f"{os.path.join(within, name)}, which the writer of rank {rank} has written ({size} bytes), is not "
                    f"seen here after {limit_s:.0f} s: its node has another directory under that name, or somebody "
                    "removed it. Give --checkpoint-dir a directory that all nodes share"
                )
            files = lacking
            self._moved()
            self._clock.sleep(VISIBLE_POLL_S)

    def _published(self, folder: str) -> str:
        """Return which save is published under the name that this one wants; nothing where that cannot be said."""
        staging = names.staging_of(folder)
        wanted = names.committed(staging.step) if staging is not None else folder
        try:
            with open(os.path.join(self._directory, wanted, names.MANIFEST), "rb") as file:
                return Manifest.from_bytes(file.read()).save
        except (OSError, DamagedCheckpoint):
            return ""

    def _discard(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        text = self._gone(message["folder"])
        self._say({"kind": "discarded", "folder": message["folder"], "text": text})

    def _gone(self, folder: str) -> str:
        """Remove a directory of ours; return why it is still there, or nothing."""
        try:
            strange = self._storage.remove(self._named(folder))
        except FileNotFoundError:
            return ""  # another writer was faster
        except OSError as error:
            return f"{folder} could not be removed: {told(error)}"
        return f"{folder} stays: it holds {', '.join(strange)}, which is not ours" if strange else ""

    def _prune(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        wrong: list[str] = []
        for folder in message["condemn"]:
            try:
                self._storage.condemn(self._named(folder))
            except FileNotFoundError:
                continue  # removed by hand meanwhile
            except OSError as error:
                wrong.append(f"{folder} could not be given up: {told(error)}")
        wrong += [text for folder in message["remove"] if (text := self._gone(folder))]
        answer = {"kind": "pruned", "condemned": message["condemn"], "removed": message["remove"]}
        self._say(answer | {"text": "; ".join(wrong)})

    def close(self) -> None:
        """Let go of the job's lock; a writer's end does so too."""
        if self._lock is not None and self._lock[1] >= 0:
            os.close(self._lock[1])
        self._lock = None

    def _keep(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        try:
            self._lock = message["lock"], share(message["lock"])
        except OSError:  # it is gone already: the first save says so
            self._lock = message["lock"], -1

    def _check_place(self) -> None:
        """Refuse to write where the job's owner file is not: below a mount that went away lies another directory."""
        if self._lock is None:
            return
        path, held = self._lock
        try:
            same = held >= 0 and os.path.samestat(os.stat(path), os.fstat(held))
        except FileNotFoundError:
            same = False
        if not same:
            raise CheckpointError(
                f"{self._directory} is not the directory that this job began with: its owner file is gone. A mount "
                "went away, somebody cleared it, or this node has another directory under that path than the other "
                "nodes (all must share one); bring it back, or start the job again"
            )


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


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return -1
        raise


def told(error: Exception) -> str:
    """Say what went wrong, and what mends it where that is known."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    name = f"{error.filename}: " if error.filename else ""
    code = errno.errorcode.get(error.errno, str(error.errno))
    mend = _MENDS.get(error.errno)
    return f"{name}{error.strerror or os.strerror(error.errno)} ({code})" + (f"; {mend}" if mend else "")
