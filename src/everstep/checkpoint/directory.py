"""A job's claim on a checkpoint directory: is it fit, whose is it, and what may be swept away.

Rule 1: what is asked of the directory later (exclusive create, rename, fsync, listing) is tried before the first
step.
Rule 2: one job at a time. Each has an owner file that says who it is, with a shared lock that its holder and its
writers keep and that dies with the last of them; it is made under a gate, a lock of its own, so that of two jobs that
come at once one is refused, by the other's name. The lock is what counts, never a time: clocks may jump.
Rule 3: what carries the name of a job whose lock is free belongs to nobody any more. Swept is only what has a name of
ours (core/names.py) and a dead owner; everything else stays.
Rule 4: a dead agent's writers end within two seconds, and are waited for; a lock of another node, which a network file
system may hold for a while after that node's death, is waited for longer. A living job is not waited for.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

from everstep.checkpoint.core import names
from everstep.checkpoint.fileops import FileOps, PosixFiles, put
from everstep.checkpoint.publish import remove
from everstep.checkpoint.unreachable import AWAY, is_away, unreachable, why
from everstep.clock import SYSTEM, Clock
from everstep.errors import ConfigurationError, EverstepError

PATIENCE_S = 3.0
"""How long writers may outlive their agent; a job that follows its predecessor's death at once waits for them."""
ELSEWHERE_S = 120.0
"""How long a lock of another node is waited for: longer than a lease of NFS v4 (90 s)."""
GATE_S = 30.0
LOOK_S = 0.05


class Claim:
    """One job's hold on a directory, from `take` to `close`. `moving` is told whenever the directory has answered.

    `several`: writers of other nodes share it, and go on where this one goes: its owner file stays, unless `over` says
    that the job has ended. What stays is swept by the next start.
    """

    def __init__(
        self,
        directory: str,
        files: FileOps | None = None,
        clock: Clock = SYSTEM,
        moving: Callable[[], None] = lambda: None,
        job: str | None = None,
        *,
        several: bool = False,
    ) -> None:
        self.over = not several
        self.directory = os.path.abspath(directory)
        self.job = job or secrets.token_hex(4)
        self.fd = -1
        self._files = files or PosixFiles()
        self._clock = clock
        self._moving = moving

    @property
    def lock(self) -> str:
        """The owner file: whoever belongs to this job holds a shared lock on it (`share`)."""
        return self._path(names.owner(self.job))

    def take(self, run: str) -> list[str]:
        """Make, try and claim the directory, and sweep it; return what was swept, as sentences.

        Raises ConfigurationError where it cannot serve, or another job has it; UnreachableStorage where it is away.
        """
        self._trying("be made", lambda: os.makedirs(self.directory, exist_ok=True))
        gate = self._gate()
        try:
            self._probe()
            self._refuse_others()
            self._lock(run)
        finally:
            self._try_unlink(names.GATE)
            os.close(gate)
        return list(self._sweep())

    def go_on(self, job: str, run: str) -> None:
        """See `storage.api.Claiming.go_on`. Nothing: the writers of all nodes hold the lock too."""

    def close(self) -> None:
        """Give the claim up."""
        if self.fd >= 0:
            if self.over:
                self._try_unlink(names.owner(self.job))  # one that stays is swept by the next start
            os.close(self.fd)
            self.fd = -1

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _probe(self) -> None:
        probe = self._path(names.probe(self.job))
        done, files = probe + ".done", self._files
        self._trying("be written to (exclusive create, fsync)", lambda: put(files, probe, b"x"))
        self._trying("rename a file and sync its names", lambda: self._renamed(probe, done))
        self._trying("list what was just written", lambda: self._listed(os.path.basename(done)))
        self._trying("remove a file", lambda: files.unlink(done))

    def _renamed(self, probe: str, done: str) -> None:
        self._files.rename(probe, done)
        self._files.fsync_dir(self.directory)

    def _listed(self, name: str) -> None:
        if name not in self._files.listdir(self.directory):
            raise OSError(0, "the new name is not in the listing")

    def _trying(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            if is_away(error):
                raise unreachable(self.directory, f"it cannot {doing}: {why(error)}", AWAY) from error
            raise ConfigurationError(
                f"the checkpoint directory {self.directory} cannot {doing}: {error.strerror}. {mend(error)}Give "
                "--checkpoint-dir a directory on a file system that this user can write to."
            ) from error
        self._moving()

    def _gate(self) -> int:
        """Come to be the only one that looks for others; return the lock to let go of."""
        path, deadline = self._path(names.GATE), self._clock.now() + GATE_S
        while True:
            fd = self._opened(path)
            if fd >= 0:
                return fd
            if self._clock.now() >= deadline:
                raise ConfigurationError(
                    f"another job has been looking at the checkpoint directory {self.directory} for over {GATE_S:.0f} "
                    f"s ({path} is locked): it is stuck there, or stopped; end that job, and start again."
                )
            self._clock.sleep(LOOK_S)

    def _opened(self, path: str) -> int:
        """Make and lock a file; -1 where somebody else has it, or it was unlinked meanwhile."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        except OSError as error:
            raise self._no_lock(path, error) from error
        return -1

    def _lock(self, run: str) -> None:
        path = self.lock
        try:
            told = {"run": run, "pid": os.getpid(), "host": socket.gethostname()}
            put(self._files, path, json.dumps(told).encode())
            self.fd = share(path)
        except OSError as error:
            raise self._no_lock(path, error) from error

    def _no_lock(self, path: str, error: OSError) -> EverstepError:
        if is_away(error):
            return unreachable(self.directory, f"it cannot be claimed by a lock ({path}): {why(error)}", AWAY)
        return ConfigurationError(
            f"the checkpoint directory {self.directory} cannot be claimed by a lock ({path}): {error.strerror}. "
            f"{mend(error)}Give --checkpoint-dir a directory that this user can write to, on a file system that has "
            "flock."
        )

    def _refuse_others(self) -> None:
        living = self._living()
        if living:
            raise ConfigurationError(
                f"the checkpoint directory {self.directory} is in use by {self._told(min(living))}, and two jobs would "
                "take each other's checkpoints for their own. End that job, or give --checkpoint-dir another directory."
            )

    def _sweep(self) -> Iterator[str]:
        for name in self._files.listdir(self.directory):
            if self._dead(name):
                yield from self._swept(name)
            self._moving()

    def _living(self) -> set[str]:
        """Jobs whose lock is held. Owner files of dead jobs go."""
        living: set[str] = set()
        for name in self._files.listdir(self.directory):
            job = names.owner_of(name)
            if job is None:
                continue
            if self._freed(name):
                self._try_unlink(name)
            else:
                living.add(job)
        return living

    def _freed(self, name: str) -> bool:
        """True when nobody holds an owner file, or whoever does is as good as gone, and lets go while we wait."""
        path = self._path(name)
        began = self._clock.now()
        while not _free(path):
            if self._clock.now() - began >= self._patience(path):
                return False
            self._moving()
            self._clock.sleep(LOOK_S)
        return True

    def _patience(self, path: str) -> float:
        owner = _read(path)
        if owner.get("host") != socket.gethostname():
            return ELSEWHERE_S if "host" in owner else 0.0
        dead = isinstance(owner.get("pid"), int) and not os.path.exists(f"/proc/{owner['pid']}")
        return PATIENCE_S if dead else 0.0

    def _told(self, job: str) -> str:
        owner = _read(self._path(names.owner(job)))
        if {"run", "pid", "host"} <= owner.keys():
            return f"the run {owner['run']} (process {owner['pid']} on {owner['host']})"
        return f"the job {job}"

    def _dead(self, name: str) -> bool:
        """Nobody but this job lives here, and it has written nothing yet."""
        if os.path.islink(self._path(name)):
            return False
        if names.staging_of(name) is not None or names.PROBE.match(name):
            return True
        if names.step_of(name) is None:
            return False
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
        elif names.step_of(name) is not None:
            yield f"removed {self._path(name)}, which an earlier job had retired for newer checkpoints"
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


def share(path: str) -> int:
    """Hold the lock of a job's owner file, until the returned descriptor is closed. OSError where it is gone.

    Open for reading alone, so that whoever must may mount the file system read-only.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # at most a look of another job that is being refused lies before it
    except OSError:
        os.close(fd)
        raise
    return fd


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


def mend(error: OSError) -> str:
    """What else helps: a full disk holds nobody from what is saved there for longer than it is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there (a few KiB), and what is saved there is read as before. "
    return ""
