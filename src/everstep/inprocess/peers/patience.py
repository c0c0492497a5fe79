"""A link whose other side says something once a second: one that says nothing for long is as good as gone."""

import os
import signal
import socket
from contextlib import suppress
from typing import Any

from everstep.recovery.link import Link, LinkClosed

PATIENCE_S = 10
"""Twice so long without a word: a watcher that is stopped. Twice, since this process may have been stopped itself."""


class PatientLink(Link):
    """Ends where its watcher is stopped, and ends that watcher: nobody else would, and it holds what it inherited."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.patience(PATIENCE_S)
        self._watcher = -1

    def watched_by(self, pid: int) -> None:
        """The other side is this process."""
        with suppress(ProcessLookupError):
            self._watcher = os.pidfd_open(pid)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """See `Link.receive`; also LinkClosed where nothing has been said for twice PATIENCE_S."""
        for _ in range(2):
            with suppress(BlockingIOError):
                return super().receive()
        if self._watcher >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watcher, signal.SIGKILL)
        raise LinkClosed(f"nothing was said for {2 * PATIENCE_S} s")

    def close(self) -> None:
        """See `Link.close`."""
        watcher, self._watcher = self._watcher, -1
        if watcher >= 0:
            os.close(watcher)
        super().close()
