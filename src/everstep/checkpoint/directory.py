"""A job's claim on a checkpoint directory: is it fit, whose is what lies there, and what may be swept away.

Rule 1: what is asked of the directory later (exclusive create, rename, fsync, listing) is tried before the first step.
Rule 2: each job has an owner file with a lock that dies with the last process that holds it: its agent and its writers.
What carries the name of a job whose lock is free belongs to nobody any more.
Rule 3: swept is only what has a name of ours (core/names.py) and a dead owner. A living job's files, and everything
else, stay.
"""

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from everstep.checkpoint.core import names
from everstep.checkpoint.fileops import FileOps, PosixFiles, put
from everstep.checkpoint.publish import remove
from everstep.clock import SYSTEM, Clock
from everstep.errors import ConfigurationError

PATIENCE_S = 3.0
"""How long writers may outlive their agent; a job that follows its predecessor's death at once waits for them."""


class Claim:
    """One job's hold on a directory, from `take` to `close`."""

    def __init__(self, directory: str, files: FileOps | None = None, clock: Clock = SYSTEM) -> None:
        self.directory = os.path.abspath(directory)
        self.job = secrets.token_hex(4)
        self.fd = -1
        self._files = files or PosixFiles()
        self._clock = clock

    def take(self, run: str) -> list[str]:
        """Make, try and claim the directory, and sweep it; return what was swept and who else is there, as sentences.

        Raises ConfigurationError where it cannot serve.
        """
        self._probe()
        self._lock(run)
        return list(self._sweep())

    def close(self) -> None:
        """Give the claim up."""
        if self.fd >= 0:
            self._try_unlink(names.owner(self.job))  # one that stays is swept by the next start
            os.close(self.fd)
            self.fd = -1

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _probe(self) -> None:
        probe = f".everstep-probe-{self.job}"
        doing = "be made"
        try:
            os.makedirs(self.directory, exist_ok=True)
            doing = "be written to (exclusive create, fsync)"
            put(self._files, self._path(probe), b"x")
            doing = "rename a file and sync its names"
            self._files.rename(self._path(probe), self._path(probe + ".done"))
            self._files.fsync_dir(self.directory)
            doing = "list what was just written"
            if probe + ".done" not in self._files.listdir(self.directory):
                raise OSError(0, "the new name is not in the listing")
            self._files.unlink(self._path(probe + ".done"))
        except OSError as error:
            raise ConfigurationError(
                f"the checkpoint directory {self.directory} cannot {doing}: {error.strerror}. Give --checkpoint-dir a "
                "directory on a file system that this user can write to."
            ) from error

    def _lock(self, run: str) -> None:
        path = self._path(names.owner(self.job))
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            told = {"run": run, "pid": os.getpid(), "host": socket.gethostname()}
            os.write(self.fd, json.dumps(told).encode())
        except OSError as error:
            raise ConfigurationError(
                f"the checkpoint directory {self.directory} cannot be claimed by a lock ({path}): {error.strerror}. "
                "Give --checkpoint-dir a directory whose file system has flock."
            ) from error

    def _sweep(self) -> Iterator[str]:
        living = self._living()
        for job in sorted(living):
            yield f"warning: {self.directory} is also in use by {self._told(job)}; give each job its own directory"
        for name in self._files.listdir(self.directory):
            if self._dead(name, living):
                yield from self._swept(name)

    def _living(self) -> set[str]:
        """Jobs whose lock is held, ours apart. Owner files of dead jobs go."""
        living: set[str] = set()
        for name in self._files.listdir(self.directory):
            job = names.owner_of(name)
            if job is None or job == self.job:
                continue
            if self._freed(name):
                self._try_unlink(name)
            else:
                living.add(job)
        return living

    def _freed(self, name: str) -> bool:
        """True when nobody holds an owner file, or its agent is dead and its writers end while we wait."""
        path = self._path(name)
        deadline = self._clock.now() + PATIENCE_S
        while not _free(path):
            if not self._orphaned(path) or self._clock.now() >= deadline:
                return False
            self._clock.sleep(PATIENCE_S / 60)
        return True

    def _orphaned(self, path: str) -> bool:
        owner = _read(path)
        here = owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int)
        return here and not os.path.exists(f"/proc/{owner['pid']}")

    def _told(self, job: str) -> str:
        owner = _read(self._path(names.owner(job)))
        if {"run", "pid", "host"} <= owner.keys():
            return f"the run {owner['run']} (process {owner['pid']} on {owner['host']})"
        return f"the job {job}"

    def _dead(self, name: str, living: set[str]) -> bool:
        staging, probe = names.staging_of(name), names.PROBE.match(name)
        if os.path.islink(self._path(name)):
            return False
        if staging is not None:
            return staging.job not in living | {self.job}
        if probe is not None:
            return probe[1] not in living | {self.job}
        if names.step_of(name) is None or living:
            return False  # a living job may be removing a condemned one itself
        return os.path.isfile(os.path.join(self._path(name), names.CONDEMNED))

    def _swept(self, name: str) -> Iterator[str]:
        if names.PROBE.match(name):
            self._try_unlink(name)
            return
        try:
            strange = remove(self._files, self._path(name))
        except OSError as error:
            yield f"warning: the leftover {self._path(name)} could not be removed: {error.strerror}"
            return
        if strange:
            yield f"warning: the leftover {self._path(name)} stays, it holds {', '.join(strange)}, which is not ours"
        else:
            yield f"removed {self._path(name)}, left over by a writer that is gone"

    def _try_unlink(self, name: str) -> None:
        try:
            self._files.unlink(self._path(name))
        except OSError:
            return


def _read(path: str) -> dict[str, Any]:
    """What an owner file says; nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            told: object = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return dict(told) if isinstance(told, dict) else {}  # pyright: ignore[reportUnknownArgumentType]


def _free(path: str) -> bool:
    """True when nobody holds the lock of an owner file, or it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
