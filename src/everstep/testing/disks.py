"""Disks that fail: everything that can happen to a writer's files, behind the same door as the real ones.

`HostileFiles` fails or kills at the k-th call of a kind; with no wounds it passes the same examination as
`PosixFiles`. `PowerLoss` notes what was made durable and by which call, and builds the directory that a machine would
find after losing power: nothing, some or all of what was not yet synced.
"""

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from everstep.checkpoint.fileops import Data, FileOps, PosixFiles

T = TypeVar("T")
KINDS = ("mkdir", "create", "write", "fsync", "close", "fsync_dir", "rename", "exchange", "unlink", "rmdir", "listdir")


class UnsyncedFiles(PosixFiles):
    """The real file system without its waits: for tests that examine order and outcome, not durability."""

    def fsync(self, fd: int) -> None:
        """Nothing."""

    def fsync_dir(self, path: str) -> None:
        """Nothing, for a directory that is there."""
        os.stat(path)


@dataclass(frozen=True, slots=True)
class Wound:
    """What goes wrong. `errno` 0: the process is killed instead, before the call, in its midst or after it."""

    errno: int = 0
    when: str = "before"  # before | torn | after

    def strike(self, path: str) -> None:
        """Fail, or die."""
        if self.errno:
            raise OSError(self.errno, os.strerror(self.errno), path)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class HostileFiles:
    """A real file system in which the n-th call of a kind (or of any kind: `any`), counted from 1, is wounded.

    Position 0 wounds every call of that kind.
    """

    wounds: Mapping[tuple[str, int], Wound] = field(default_factory=dict[tuple[str, int], Wound])
    inner: FileOps = field(default_factory=UnsyncedFiles)
    calls: Counter[str] = field(default_factory=Counter[str])

    def _wound(self, kind: str) -> Wound | None:
        self.calls[kind] += 1
        self.calls["any"] += 1
        keys = ((kind, self.calls[kind]), (kind, 0), ("any", self.calls["any"]))
        return next((self.wounds[key] for key in keys if key in self.wounds), None)

    def _do(self, kind: str, path: str, call: Callable[[], T]) -> T:
        wound = self._wound(kind)
        if wound is not None and wound.when == "before":
            wound.strike(path)
        try:
            return call()
        finally:
            if wound is not None and wound.when != "before":
                wound.strike(path)

    def mkdir(self, path: str) -> None:
        """See `FileOps.mkdir`."""
        return self._do("mkdir", path, lambda: self.inner.mkdir(path))

    def create(self, path: str) -> int:
        """See `FileOps.create`."""
        return self._do("create", path, lambda: self.inner.create(path))

    def write(self, fd: int, data: Data) -> int:
        """See `FileOps.write`. Torn: half of it is written first."""
        upcoming = (("write", self.calls["write"] + 1), ("write", 0), ("any", self.calls["any"] + 1))
        torn = any(self.wounds[key].when == "torn" for key in upcoming if key in self.wounds)
        part = memoryview(data)[: len(data) // 2] if torn else data
        return self._do("write", "", lambda: self.inner.write(fd, part))

    def fsync(self, fd: int) -> None:
        """See `FileOps.fsync`."""
        return self._do("fsync", "", lambda: self.inner.fsync(fd))

    def close(self, fd: int) -> None:
        """See `FileOps.close`."""
        return self._do("close", "", lambda: self.inner.close(fd))

    def fsync_dir(self, path: str) -> None:
        """See `FileOps.fsync_dir`."""
        return self._do("fsync_dir", path, lambda: self.inner.fsync_dir(path))

    def rename(self, old: str, new: str) -> None:
        """See `FileOps.rename`."""
        return self._do("rename", old, lambda: self.inner.rename(old, new))

    def exchange(self, one: str, other: str) -> None:
        """See `FileOps.exchange`."""
        return self._do("exchange", one, lambda: self.inner.exchange(one, other))

    def unlink(self, path: str) -> None:
        """See `FileOps.unlink`."""
        return self._do("unlink", path, lambda: self.inner.unlink(path))

    def rmdir(self, path: str) -> None:
        """See `FileOps.rmdir`."""
        return self._do("rmdir", path, lambda: self.inner.rmdir(path))

    def listdir(self, path: str) -> list[str]:
        """See `FileOps.listdir`."""
        return self._do("listdir", path, lambda: self.inner.listdir(path))


@dataclass
class _File:
    durable: bytes | None = None  # None: never synced
    content: bytearray = field(default_factory=bytearray)


@dataclass
class _Folder:
    durable: dict[str, "_File | _Folder"] = field(default_factory=dict[str, "_File | _Folder"])
    pending: list[dict[str, "_File | _Folder"]] = field(default_factory=list[dict[str, "_File | _Folder"]])

    @property
    def now(self) -> dict[str, "_File | _Folder"]:
        return self.pending[-1] if self.pending else self.durable

    def change(self, entries: dict[str, "_File | _Folder"]) -> None:
        self.pending.append(entries)


class PowerLoss:
    """A real file system below `root`, and beside it the knowledge of what would survive a loss of power.

    Names survive in the order in which they were changed, as on a journaled file system; a file's content survives
    up to its last fsync, beyond it by luck: cut, whole, or with zeros where bytes were not written.
    """

    def __init__(self, root: str, inner: FileOps | None = None) -> None:
        self.root = os.path.abspath(root)
        self.inner = inner or UnsyncedFiles()
        self.watch: Callable[[], None] = lambda: None
        """Called after every call: the instant at which power may be lost."""
        self._tree = _Folder()
        self._open: dict[int, _File] = {}

    def _folder(self, path: str) -> tuple[_Folder, str]:
        *above, name = os.path.relpath(path, self.root).split(os.sep)
        folder = self._tree
        for part in above:
            below = folder.now[part]
            assert isinstance(below, _Folder)
            folder = below
        return folder, name

    def mkdir(self, path: str) -> None:
        """See `FileOps.mkdir`."""
        self.inner.mkdir(path)
        folder, name = self._folder(path)
        folder.change({**folder.now, name: _Folder()})
        self.watch()

    def create(self, path: str) -> int:
        """See `FileOps.create`."""
        fd = self.inner.create(path)
        folder, name = self._folder(path)
        made = self._open[fd] = _File()
        folder.change({**folder.now, name: made})
        self.watch()
        return fd

    def write(self, fd: int, data: Data) -> int:
        """See `FileOps.write`."""
        count = self.inner.write(fd, data)
        self._open[fd].content += bytes(data[:count])
        self.watch()
        return count

    def fsync(self, fd: int) -> None:
        """See `FileOps.fsync`."""
        self.inner.fsync(fd)
        self._open[fd].durable = bytes(self._open[fd].content)
        self.watch()

    def close(self, fd: int) -> None:
        """See `FileOps.close`."""
        self.inner.close(fd)
        del self._open[fd]
        self.watch()

    def fsync_dir(self, path: str) -> None:
        """See `FileOps.fsync_dir`."""
        self.inner.fsync_dir(path)
        folder = self._tree
        if os.path.abspath(path) != self.root:
            above, name = self._folder(path)
            below = above.now[name]
            assert isinstance(below, _Folder)
            folder = below
        folder.durable, folder.pending = dict(folder.now), []
        self.watch()

    def rename(self, old: str, new: str) -> None:
        """See `FileOps.rename`."""
        self.inner.rename(old, new)
        folder, before = self._folder(old)
        other, after = self._folder(new)
        assert folder is other, "renamed within one directory"
        entries = dict(folder.now)
        entries[after] = entries.pop(before)
        folder.change(entries)
        self.watch()

    def exchange(self, one: str, other: str) -> None:
        """See `FileOps.exchange`."""
        self.inner.exchange(one, other)
        folder, first = self._folder(one)
        _, second = self._folder(other)
        entries = dict(folder.now)
        entries[first], entries[second] = entries[second], entries[first]
        folder.change(entries)
        self.watch()

    def unlink(self, path: str) -> None:
        """See `FileOps.unlink`."""
        self.inner.unlink(path)
        self._drop(path)

    def rmdir(self, path: str) -> None:
        """See `FileOps.rmdir`."""
        self.inner.rmdir(path)
        self._drop(path)

    def _drop(self, path: str) -> None:
        folder, name = self._folder(path)
        folder.change({key: value for key, value in folder.now.items() if key != name})
        self.watch()

    def listdir(self, path: str) -> list[str]:
        """See `FileOps.listdir`."""
        return self.inner.listdir(path)

    def after(self, path: str, luck: random.Random | None) -> None:
        """Build at `path` what is found after a loss of power now. `luck` None: nothing unsynced has survived."""
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
        _build(self._tree, Path(path), luck)


def _build(folder: _Folder, path: Path, luck: random.Random | None) -> None:
    states = [folder.durable, *folder.pending]
    entries = folder.durable if luck is None else luck.choice(states)
    for name, node in entries.items():
        if isinstance(node, _Folder):
            (path / name).mkdir()
            _build(node, path / name, luck)
        else:
            (path / name).write_bytes(_survived(node, luck))


def _survived(file: _File, luck: random.Random | None) -> bytes:
    synced, content = file.durable or b"", bytes(file.content)
    if luck is None or content == synced:
        return synced
    cut = luck.randint(len(synced), len(content))
    return luck.choice([content[:cut], content[:cut] + bytes(len(content) - cut), content])
