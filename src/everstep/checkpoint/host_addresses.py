"""At which addresses this host can be reached by the others of its world, and where it listens for them.

A host has several addresses, and nothing here can know which of them the others reach: all are told, the likely first.
"""

import contextlib
import fcntl
import ipaddress
import socket
import struct

from everstep import environ

_SIOCGIFADDR = 0x8915
_NAMED = ("EVERSTEP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_IF_INET6 = "/proc/net/if_inet6"
_LINK_LOCAL = "20"
ANY_PORT = 9


def listening() -> socket.socket:
    """Listen for other hosts, at a port of the kernel's choice. Nothing is believed of who comes (host_line.py)."""
    with contextlib.suppress(OSError):
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def ours() -> list[str]:
    """Return our addresses as numbers: of interfaces that were named, towards the master, all others, the loopback."""
    given = [one for name in _NAMED for one in (environ.get(name) or "").split(",")]
    named = [one.removeprefix("=") for one in given if one and not one.startswith("^")]
    interfaces = _interfaces()
    likely = [address for name, address in interfaces if any(name.startswith(one) for one in named)]
    master = _towards(environ.get("MASTER_ADDR") or "")
    every = dict.fromkeys([*likely, *master, *(address for _, address in interfaces)])
    loop = [address for address in every if ipaddress.ip_address(address).is_loopback]
    return [*(address for address in every if address not in loop), *loop]


def _towards(host: str) -> list[str]:
    """Return the address from which we would speak to a host: routes are asked, nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM) if host else ():
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return [str(probe.getsockname()[0])]
    return []


def _interfaces() -> list[tuple[str, str]]:
    """Return names and addresses of what is up here."""
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError), open(_IF_INET6, encoding="ascii") as table:
        for row in table:
            digits, _, _, scope, _, name = row.split()
            if scope != _LINK_LOCAL:
                found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found
