"""By which address the other nodes reach this machine (LA-15).

Where the end point is this machine's own name, `/etc/hosts` often says 127.0.1.1 for it (Debian's installer does): no
other node could reach a port opened there, nor a store that serves there.
"""

import socket

_ELSEWHERE = ("192.0.2.1", 9)
"""Of the block that is kept for documentation (RFC 5737): nothing is sent there, the kernel only looks up the way."""


def is_loopback(address: str) -> bool:
    """Tell whether only this machine reaches it."""
    return address.startswith("127.") or address == "::1"


def meant_for_one_machine(host: str) -> bool:
    """Tell whether an end point was written so that all agents of the job are on one machine."""
    return is_loopback(host) or host.split(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback")


def outward(own: str, host: str) -> str:
    """Return `own`, the address from which we reach the end point `host`; where only we could, one that others can."""
    if not is_loopback(own) or meant_for_one_machine(host):
        return own
    return _of_default_route() or _of_an_interface() or own


def _of_default_route() -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)
            found = str(probe.getsockname()[0])
    except OSError:  # no way out of here: a network of its own
        return ""
    return "" if is_loopback(found) else found


def _of_an_interface() -> str:
    import psutil  # noqa: PLC0415 - wanted on few machines

    addresses = (a.address for of_one in psutil.net_if_addrs().values() for a in of_one if a.family == socket.AF_INET)
    return next((address for address in addresses if not is_loopback(address)), "")
