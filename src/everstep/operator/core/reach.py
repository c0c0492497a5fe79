"""Which agent is asked, and where: pure.

Rule 1: loopback is another place on each machine: a file that names it counts on the machine that wrote it alone.
Rule 2: any one agent answers for all nodes, so any of a job's control files will do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.errors import EverstepError, UsageError

_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^/\s:]+):(?P<port>\d{1,5})")
_ANY = ("0.0.0.0", "::")


class Listed(Protocol):
    """What a control file says of an agent; see `recovery.control_file`."""

    @property
    def address(self) -> str:
        """Where it listens."""
        ...

    @property
    def port(self) -> int:
        """Likewise."""
        ...

    @property
    def token(self) -> str:
        """What it wants to hear."""
        ...

    @property
    def host(self) -> str:
        """The name of its machine."""
        ...


class NobodyThere(EverstepError):
    """The job does not run, or its agent does not answer; says which."""


@dataclass(frozen=True, slots=True)
class Reach:
    """An agent's end point, and what it wants to hear."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoint(text: str, token: str | None) -> Reach | None:
    """Read HOST:PORT; None for what is a path. UsageError where it is one and there is no token."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or int(match["port"]) >= 1 << 16:
        return None
    if not token:
        raise UsageError(
            f"{text} is asked with the job's token: set EVERSTEP_TOKEN to the one in control.json in its run folder, "
            "or name that folder instead."
        )
    return Reach(match["host"].strip("[]"), int(match["port"]), token)


def choices(found: Sequence[Listed], here: str) -> list[Reach]:
    """Return the end points that can be asked from the machine `here`, those on it first.

    NobodyThere where there is none.
    """
    own = [
        Reach("::1" if one.address == "::" else _own(one.address), one.port, one.token)
        for one in found
        if one.host == here
    ]
    far = [
        Reach(one.host if one.address in _ANY else one.address, one.port, one.token)
        for one in found
        if one.host != here and not _loopback(one.address)
    ]
    if own or far:
        return own + far
    hosts = ", ".join(sorted({one.host for one in found}))
    raise NobodyThere(
        f"the agents of this job answer on loopback alone, on {hosts}, and this is {here}: run the command there, or "
        "start the job with --control-endpoint ADDRESS:PORT"
    )


def _own(address: str) -> str:
    return "127.0.0.1" if address in _ANY else address


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")
