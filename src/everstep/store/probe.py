"""A bounded look at a store's end point before a TCPStore client is opened to it.

The client's constructor connects, announces itself and waits for the answer to a ping, for ever where the host is
frozen (E1): the kernel still accepts connections for it, and for the child of a dead host as well (E9). So the same
words are said here first, on a socket of ours with a deadline.
"""

import socket
import struct

from everstep.clock import SYSTEM
from everstep.errors import StoreError, StoreTimeout

_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13  # torch's TCPStore protocol, 2.3 to 2.13
_NONCE = 0x45564552


def probe(host: str, port: int, timeout_s: float) -> None:
    """Return when a living TCPStore host has answered. Raises StoreError or StoreTimeout within `timeout_s`."""
    who = f"store {host}:{port}"
    deadline = SYSTEM.now() + timeout_s
    try:
        with socket.create_connection((host, port), timeout_s) as line:
            line.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, _NONCE))
            answer = b""
            while len(answer) < struct.calcsize("=I"):
                line.settimeout(max(0.001, deadline - SYSTEM.now()))
                part = line.recv(64)
                if not part:
                    raise StoreError(
                        f"{who} hangs up on a TCPStore client: something else listens there, or it is ending"
                    )
                answer += part
    except TimeoutError as error:
        raise StoreTimeout(
            f"{who} did not answer within {timeout_s:g} s: its host is frozen, overloaded or cut off"
        ) from error
    except OSError as error:
        raise StoreError(f"{who} cannot be reached: {error.strerror or error}; is its host running?") from error
    if answer != struct.pack("=I", _NONCE):
        raise StoreError(f"{who} answers, but not as torch's TCPStore does: something else listens there")
