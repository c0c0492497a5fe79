"""Ranks without an agent, forked from one warm interpreter; nothing of them may outlive its test."""

import contextlib
import os
import signal
import socket
import time
import uuid
from pathlib import Path

import pytest


class Bare:
    """Runs a scenario in ranks that nobody restarts or ends, with what srun would have told them."""

    def __init__(self, forks) -> None:
        self._forks = forks
        self.mark = uuid.uuid4().hex

    def run(self, function, ranks=2, limit_s=45.0, **arguments):
        """Return what each rank returned."""
        return self._forks.run(function, ranks, limit_s, **self._told(ranks, arguments))

    def outcomes(self, function, ranks=2, **arguments):
        """Return {"value": …}, {"error": …} or {"died": status} for each rank."""
        return self._forks.outcomes(function, ranks, **self._told(ranks, arguments))

    def _told(self, ranks, arguments):
        return {
            "env": {"EVERSTEP_TEST_MARK": self.mark, "WORLD_SIZE": str(ranks)},
            "front": self.free_port(),
            **arguments,
        }

    @staticmethod
    def free_port():
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            return door.getsockname()[1]

    def left(self):
        """Processes that carry this test's mark, zombies apart."""
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, IndexError):
                marked = name.isdigit() and self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes()
                if marked and Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(name))
        return found


@pytest.fixture
def bare(forks):
    """See `Bare`. Watchers, hub and store end by themselves within 2 s, whatever died."""
    made = Bare(forks)
    yield made
    deadline = time.monotonic() + 2.0
    while made.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in made.left()}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"
