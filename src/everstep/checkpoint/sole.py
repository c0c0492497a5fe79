"""One Checkpointer to a directory: a lock that dies with its holder, and says who that is and whether it is ending.

A successor of one whose ranks have ended (torchrun starts them again) waits for it: it is about to write the newest
state that they left, and that is where the successor goes on. Any other is refused at once.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from everstep.checkpoint.directory import ELSEWHERE_S, mend
from everstep.checkpoint.unreachable import AWAY, is_away, unreachable, why
from everstep.clock import Clock
from everstep.errors import ConfigurationError

NAME = ".everstep.lock"
POLL_S = 0.05
NOTICES_S = 3.0
"""So long a holder may look alive whose ranks have just been killed; on another host, directory.ELSEWHERE_S."""


class SoleUse:
    """Held from `take` to `close`."""

    def __init__(self, directory: str, who: str, clock: Clock) -> None:
        self._directory, self._who, self._clock = directory, who, clock
        self._path = os.path.join(directory, NAME)
        self._fd = -1
        self._began, self._told = 0.0, False

    def take(self, wait_s: float, say: Callable[[str], None]) -> bool:
        """Have the directory, made where it is missing; False: ask again in a moment, its holder is ending.

        Raises ConfigurationError where another has it, is still not done after `wait_s`, or it cannot be had.
        """
        if self._fd < 0:
            self._open()
        if self._locked():
            self._write(ending=False)
            return True
        holder, waited = self._holder(), self._clock.now() - self._began
        elsewhere = holder.get("host", socket.gethostname()) != socket.gethostname()
        patience = ELSEWHERE_S if elsewhere else NOTICES_S  # a server keeps the lock of a host that is gone for a while
        if waited > (wait_s if holder.get("ending") else patience):
            self._refuse(holder, waited)
        if not self._told and (holder.get("ending") or elsewhere):
            self._told = True
            what = "is writing what its ranks have left" if holder.get("ending") else "has it, unless that host is gone"
            say(f"{self._directory}: waiting for {_name(holder)}, which {what}")
        return False

    def _open(self) -> None:
        self._began, self._told = self._clock.now(), False
        try:
            os.makedirs(self._directory, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if is_away(error):
                raise unreachable(self._directory, f"it cannot be made or written to: {why(error)}", AWAY) from error
            raise ConfigurationError(
                f"the checkpoint directory {self._directory} cannot be made or written to: {error.strerror}. "
                f"{mend(error)}Give the Checkpointer a directory that this user can write to."
            ) from error

    def ending(self) -> None:
        """The ranks have ended: who comes now may wait for us."""
        self._write(ending=True)

    def close(self) -> None:
        """Give it up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _locked(self) -> bool:
        try:
            self._flock()
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConfigurationError(
                f"the checkpoint directory {self._directory} cannot be claimed by a lock ({self._path}): "
                f"{error.strerror}. {mend(error)}Give the Checkpointer a directory whose file system has flock."
            ) from error
        return True

    def _flock(self) -> None:
        """Open for reading alone, so that whoever must may mount the file system read-only; NFS wants it writable."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            os.close(self._fd)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _holder(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(os.pread(self._fd, 4096, 0))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _refuse(self, holder: dict[str, Any], waited: float) -> None:
        os.close(self._fd)
        self._fd = -1
        what = f"is still writing what its ranks have left after {waited:.0f} s" if holder.get("ending") else "has it"
        raise ConfigurationError(
            f"the checkpoint directory {self._directory} is in use: {_name(holder)} {what}. Give each Checkpointer a "
            "directory of its own, or close the other one first."
        )

    def _write(self, *, ending: bool) -> None:
        told = {"pid": os.getpid(), "host": socket.gethostname(), "who": self._who, "ending": ending}
        content = json.dumps(told).encode()
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # a read-only one: the lock holds without its words
            return
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
        except OSError:  # a full disk
            return
        finally:
            os.close(fd)


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"{holder.get('who')} (keeper {holder.get('pid')} on {holder.get('host')})"
