"""Where the agents of a job meet, read from torchrun's flags: pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import UsageError

DEFAULT_PORT = 29500
"""torchrun's own, for an end point that names none."""
CONNECT_S = 60.0
JOIN_S = 600.0
LAST_CALL_S = 30.0
"""torchrun's own: so long is waited for more nodes where as many as must be there have come."""
_BACKENDS = ("static", "c10d")
_KNOWN = ("timeout", "join_timeout", "last_call_timeout", "read_timeout", "rank", "is_host")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where, who opens it, and how long is waited for whom."""

    host: str
    port: int
    hosts: bool | None  # this node opens it; None: it does where the address is its own
    node_rank: int | None
    connect_s: float = CONNECT_S
    join_s: float = JOIN_S
    last_call_s: float = LAST_CALL_S

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def backend_of(flags: Mapping[str, Any]) -> str:
    """Read how nodes number themselves. Raises UsageError, for a job of one node too."""
    backend = str(flags.get("rdzv_backend") or "static")
    if backend not in _BACKENDS:
        raise UsageError(
            f"--rdzv-backend {backend}: everstep run knows static and c10d. Either meets at --rdzv-endpoint, opened by "
            "the node whose address that is."
        )
    return backend


def endpoint_of(flags: Mapping[str, Any]) -> Endpoint:
    """Read it from the flags of a job of several nodes. Raises UsageError."""
    backend = backend_of(flags)
    node_rank = flags.get("node_rank")
    conf = _conf(str(flags.get("rdzv_conf") or ""))
    given = str(flags.get("rdzv_endpoint") or "")
    if not given and backend == "static":
        given = f"{flags.get('master_addr') or '127.0.0.1'}:{flags.get('master_port') or DEFAULT_PORT}"
    if not given:
        raise UsageError("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on all nodes.")
    host, port = _split(given)
    hosts = node_rank == 0 if backend == "static" else None
    if backend == "static" and node_rank is None:
        raise UsageError(
            "--rdzv-backend static (the default) needs --node-rank on each node, 0 on the one whose address is "
            f"{host}. Or give --rdzv-backend c10d, where nodes number themselves."
        )
    if "is_host" in conf:
        hosts = conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
    connect_s = _seconds(conf, "read_timeout", CONNECT_S)
    join_s = _seconds(conf, "join_timeout", _seconds(conf, "timeout", JOIN_S))
    last_call_s = _seconds(conf, "last_call_timeout", LAST_CALL_S)
    return Endpoint(host, port, hosts, node_rank, min(connect_s, join_s), join_s, last_call_s)


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, str(DEFAULT_PORT)
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rdzv-endpoint {text}: give HOST:PORT, a port of 1 to 65535.")
    return host, int(port)


def _conf(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals or name.strip() not in _KNOWN:
            raise UsageError(f"--rdzv-conf {pair}: known are {', '.join(_KNOWN)}, as NAME=VALUE.")
        found[name.strip()] = value.strip()
    return found


def _seconds(conf: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        seconds = float(conf.get(name, otherwise))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--rdzv-conf {name}={conf[name]}: give seconds, more than 0.")
    return seconds
