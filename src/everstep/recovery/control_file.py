"""`control.json` in a run folder: where the agent of a node answers operators, and the token that they need.

Mode 0600: who can read it is the job's owner, and that is what the token shows.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "control.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class ControlFile:
    """What stands in it. `host` is the machine's own name: loopback means another place on each."""

    address: str
    port: int
    token: str
    host: str
    node: str
    pid: int
    job: str

    def write(self, folder: Path) -> None:
        """Put it there, whole or not at all; nobody else can read it, not for a moment. Raises OSError."""
        part = folder / f".{NAME}.{self.pid}"
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                json.dump({"version": VERSION, **asdict(self)}, file)
                file.write("\n")
            part.replace(folder / NAME)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    @classmethod
    def read(cls, path: Path) -> "ControlFile":
        """Read one. Raises OSError, and ValueError for what is none."""
        body: Mapping[str, Any] = json.loads(path.read_text())
        try:
            return cls(
                str(body["address"]), int(body["port"]), str(body["token"]), str(body["host"]), str(body["node"]),
                int(body["pid"]), str(body["job"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no control file: {error!r}") from None


def remove(folder: Path) -> None:
    """Take it away: the agent answers no more. What cannot be removed stays, and leads nowhere."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink()
