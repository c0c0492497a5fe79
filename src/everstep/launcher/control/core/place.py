"""Where the end point listens: pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import UsageError

FLAG = "--control-endpoint"


@dataclass(frozen=True, slots=True)
class Place:
    """An address of this machine and a port; 0: any that is free."""

    host: str = "127.0.0.1"
    port: int = 0


LOOPBACK = Place()


def place_of(given: Mapping[str, Any], variable: str | None) -> Place | None:
    """Read `--control-endpoint`, else EVERSTEP_CONTROL_ENDPOINT; None: there shall be none. Raises UsageError."""
    text = str(given.get("control_endpoint") or variable or "")
    if text == "none":
        return None
    if not text:
        return LOOPBACK
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, "0"
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise UsageError(f"{FLAG} {text}: give ADDRESS:PORT (port 0: any that is free), or `none`.")
    return Place(host, int(port))
