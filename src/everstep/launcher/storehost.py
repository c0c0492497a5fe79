"""The store's own small process: a TCPStore server, so that no worker hosts it."""

from datetime import timedelta

import torch.distributed as dist

from everstep.recovery.link import Link, LinkClosed


def main(link: Link, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve until the agent's line closes; a port in use is told, not raised."""
    try:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except (RuntimeError, OSError) as error:
        text = f"the store cannot listen on {host}:{port}: {str(error).splitlines()[0]}. Choose another --master-port."
        link.send({"kind": "store.failed", "text": text})
        return
    link.send({"kind": "store.ready", "host": host, "port": store.port})
    while True:
        try:
            link.receive()
        except LinkClosed:
            return
