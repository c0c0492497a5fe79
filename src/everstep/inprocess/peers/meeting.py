"""How the ranks of a job without an agent find their hub, on rank 0's machine.

Rule 1: where nobody listens at MASTER_ADDR:MASTER_PORT (srun, bare processes), the hub does, until all have come; then
        the port is the script's own again.
Rule 2: where a TCPStore listens there (torchrun's agent, or one that the script has made), the hub takes any free port
        and leaves its address in that store.
Rule 3: rank 0 finds out which it is by trying to listen; the others by a bounded probe of the store's own protocol.
"""

import contextlib
import errno
import socket
from collections.abc import Mapping
from typing import Any

from torch.distributed import TCPStore

from everstep.clock import SYSTEM
from everstep.errors import ConfigurationError, StoreError, StoreTimeout
from everstep.inprocess.peers.core.launch import Launch
from everstep.process import detach
from everstep.recovery.link import Link, LinkClosed
from everstep.store.probe import probe
from everstep.store.tcp import TcpStore

PROBE_S = 5.0
RETRY_S = 0.1
_HANGS_UP = "hangs up"


class Hub:
    """Rank 0's hold of the hub: while it is open, the hub waits for the others."""

    def __init__(self, launch: Launch, settings: Mapping[str, Any]) -> None:
        self._launch, self._settings = launch, settings
        self._link: Link | None = None
        self._store: Any = None
        self.pid = 0

    def start(self) -> tuple[str, int]:
        """Start it; return where its watchers connect. Raises ConfigurationError."""
        taken = self._launch.kind == "torchrun"  # its agent's store has the port
        said = self._order(0 if taken else self._launch.master[1])
        if said["kind"] == "hub.failed" and said["errno"] in (errno.EADDRINUSE, errno.EACCES):
            taken, said = True, self._order(0)
        if said["kind"] == "hub.failed":
            raise ConfigurationError(f"no port can be opened on {self._launch.bind}: {said['text']}")
        address = (self._launch.master[0], int(said["port"]))
        self.pid = int(said["pid"])
        if taken and self._launch.kind != "alone":
            with _store(self._launch) as store:
                store.set(_key(self._launch), f"{address[0]} {address[1]}".encode())
        return address

    def _order(self, front: int) -> Mapping[str, Any]:
        self.close()
        ours, theirs = Link.pair()
        detach.start("everstep.launcher.peers.hub", fds=(theirs.fileno(),))
        theirs.close()
        launch = self._launch
        ours.send(
            {
                "job": launch.job,
                "world_size": launch.world_size,
                "bind": launch.bind,
                "advertise": launch.master[0],
                "front": front,
                "store": self._own_store(),
                "settings": self._settings,
            }
        )
        self._link = ours
        try:
            return ours.receive()[0]
        except LinkClosed:
            raise ConfigurationError("the hub's process ended before it could listen; see what it printed") from None

    def _own_store(self) -> int:
        """The first generations may meet in this process, while the hub's own store imports torch: a death of rank 0
        ends them anyway. One by itself needs no other.
        """
        if self._store is None:
            door = socket.create_server((self._launch.bind, 0), backlog=2048)
            port = door.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
            )
        return int(self._store.port)

    def close(self) -> None:
        """Let go of it: from here on it lives for as long as a watcher is connected."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


def find(launch: Launch, timeout_s: float) -> tuple[str, int]:
    """Return where the hub is, as soon as rank 0's process has started it. Raises ConfigurationError."""
    host, port = launch.master
    deadline = SYSTEM.now() + timeout_s
    last = ""
    while (left := deadline - SYSTEM.now()) > 0:
        try:
            probe(host, port, min(PROBE_S, left))
        except StoreError as error:
            if _HANGS_UP in str(error):
                return host, port  # no store, and somebody there: the hub
            last = str(error)
        else:
            with contextlib.suppress(StoreError):
                found = _told(launch, left)
                if _serves(*found):
                    return found
                last = f"the hub at {found[0]}:{found[1]}, which an earlier start left word of, is gone"
        SYSTEM.sleep(RETRY_S)
    raise ConfigurationError(
        f"rank {launch.rank} of {launch.world_size} has not found rank 0 at {host}:{port} within {timeout_s:g} s "
        f"({last or 'a store listens there, and rank 0 has left no address in it'}). Is rank 0 running, and are "
        "MASTER_ADDR and MASTER_PORT the same on all ranks?"
    )


def _serves(host: str, port: int) -> bool:
    """Tell whether a hub is there: torchrun's store outlives the ranks that it starts again."""
    try:
        probe(host, port, PROBE_S)
    except StoreError as error:
        return _HANGS_UP in str(error)
    return False


def _told(launch: Launch, timeout_s: float) -> tuple[str, int]:
    with _store(launch) as store:
        if not store.wait([_key(launch)], timeout_s=timeout_s):
            raise StoreTimeout("rank 0 has left no address")
        host, port = (store.get(_key(launch)) or b"").decode().rsplit(" ", 1)
        return host, int(port)


@contextlib.contextmanager
def _store(launch: Launch) -> Any:
    store = TcpStore.open(*launch.master)
    try:
        yield store
    finally:
        store.close()


def _key(launch: Launch) -> str:
    return f"everstep/hub/{launch.job}"
