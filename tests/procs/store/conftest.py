"""Store hosts in processes of their own."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.recovery.link import Link

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")  # see everstep.store.connection.OPEN_S


class HostProcess:
    """A host; `signal` freezes and thaws it."""

    def __init__(self, orders, address="127.0.0.1", port=0, namespace=None):
        self.link, theirs = Link.pair()
        orders.send({"address": address, "port": port, "namespace": namespace}, [theirs.fileno()])
        theirs.close()
        self.pid = orders.receive()[0]["pid"]
        self.pidfd = os.pidfd_open(self.pid)
        self.said, _ = self.link.receive()
        self.address, self.port = address, self.said.get("port")

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
        while number == signal.SIGSTOP and not self._stopped():
            time.sleep(0.002)  # each thread stops when it next runs

    def _stopped(self):
        stats = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def ends(self, within_s=10):
        return bool(select.select([self.pidfd], [], [], within_s)[0])

    def kill(self):
        self.signal(signal.SIGKILL)
        assert self.ends()

    def close(self):
        self.kill()
        self.link.close()
        os.close(self.pidfd)


@pytest.fixture(scope="session")
def orders():
    """The line to whoever forks hosts."""
    ours, theirs = Link.pair()
    words = [sys.executable, str(Path(__file__).with_name("serve.py")), str(theirs.fileno())]
    with subprocess.Popen(words, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield ours
        ours.close()
        process.wait(20)


@pytest.fixture(scope="session")
def shared_host(orders):
    """One healthy host for all tests that do not hurt theirs."""
    host = HostProcess(orders)
    yield host
    host.close()


@pytest.fixture
def start(orders):
    """Start hosts that a test may hurt."""
    hosts = []

    def make(**options):
        hosts.append(HostProcess(orders, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
