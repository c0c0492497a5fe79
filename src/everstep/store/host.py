"""The store's host: a small process of its own, so that no worker's death takes the store away.

It opens its port itself, hands the listening socket to torch's server, says over its line where it is, and ends when
the line does (its agent is gone: the node counts as lost, P15). It forks nothing, so nobody inherits its port: once it
is dead, its address refuses connections and can be bound again (against E9).

    {"kind": "store.ready", "host": "127.0.0.1", "port": 40001}        or
    {"kind": "store.failed", "text": "port 29500 on 127.0.0.1 cannot be used: …"}

and is told when a generation has begun, so that what stood there for earlier ones can go:

    {"kind": "store.forget", "epoch": 0, "generation": 7}
"""

import contextlib
import datetime
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from torch.distributed import TCPStore

from everstep.store import keys


class Line(Protocol):
    """As much of a `recovery.link.Link` as is used here; the layer above owns it."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        ...

    def receive(self) -> Any:
        """Wait for the next; raises ConnectionError at the end."""
        ...


def main(link: Line, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve a store at `host`:`port` (0: any free one) until the line ends."""
    try:
        listening = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        text = (
            f"port {port} on {host} cannot be used: {error.strerror}. Another process listens there, or the address is "
            "not this machine's; choose another port, or 0 for any free one"
        )
        with contextlib.suppress(ConnectionError):
            link.send({"kind": "store.failed", "text": text})
        return
    port = listening.getsockname()[1]
    server = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(),
        timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    with contextlib.suppress(ConnectionError):
        link.send({"kind": "store.ready", "host": host, "port": port})
        while True:
            message, _ = link.receive()
            if message["kind"] == "store.forget":
                forget(server, int(message["epoch"]), int(message["generation"]))
    del server


def forget(server: Any, epoch: int, generation: int) -> None:
    """Delete the keys of earlier generations. A torch that cannot list them keeps them."""
    for key in server.list_keys() if hasattr(server, "list_keys") else ():
        if keys.past(key, epoch, generation):
            server.delete_key(key)
