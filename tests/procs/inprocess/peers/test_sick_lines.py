"""One slow, one broken and one talkative watcher beside healthy ones: the hub is late for nobody (HD-08)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from everstep.inprocess.peers import Settings
from everstep.recovery.link import Link

pytestmark = pytest.mark.procs

RANKS, HALF, GARBAGE, FLOOD = 8, 5, 6, 7
LASTS_S = 14.0  # longer than the lease of a watcher that says nothing whole
LATE_S = 4.0  # a beat is due once in half a second; a watcher gives its hub up after 8 s


class Watcher:
    """One rank's connection, as its watcher has it."""

    def __init__(self, rank, port):
        self.line = socket.create_connection(("127.0.0.1", port))
        self.lost, self.gaps = set(), []
        self.say({"kind": "join", "job": "j", "rank": rank, "world_size": RANKS, "incarnation": str(rank)})

    def say(self, message):
        self.line.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, until):
        """Beat once a second, and note what the hub says until then."""
        self.line.settimeout(1.0)
        unread, last = b"", time.monotonic()
        while (now := time.monotonic()) < until:
            self.say({"kind": "alive"})
            with contextlib.suppress(TimeoutError):
                *whole, unread = (unread + self.line.recv(1 << 16)).split(b"\n")
                for message in map(json.loads, whole):
                    fact = message.get("fact", {})
                    self.lost |= {int(fact["incarnation"])} if fact.get("is") == "gone" else set()
                self.gaps.append(time.monotonic() - last)
                last = time.monotonic()
            time.sleep(max(0.0, 0.2 - (time.monotonic() - now)))


@pytest.fixture
def hub():
    """A hub of its own; its port and its pid."""
    ours, theirs = Link.pair()
    order = {"job": "j", "world_size": RANKS, "bind": "127.0.0.1", "advertise": "127.0.0.1", "front": 0, "store": 0}
    fd = theirs.fileno()
    with subprocess.Popen([sys.executable, "-m", "everstep.launcher.peers.hub", str(fd)], pass_fds=[fd]):
        theirs.close()
        ours.send(order | {"settings": Settings().to_json()})
        told = ours.receive()[0]
    yield told["port"], told["pid"]
    children = psutil.Process(told["pid"]).children(recursive=True)
    os.kill(told["pid"], signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    ours.close()


def test_a_half_message_garbage_and_a_flood_are_their_own_rank_s_trouble(hub):
    port, pid = hub
    with contextlib.ExitStack() as lines:
        watchers = [Watcher(rank, port) for rank in range(RANKS)]
        for watcher in watchers:
            lines.enter_context(watcher.line)
        live_through(watchers, pid)
        for watcher in watchers[1:]:
            watcher.line.close()
        watchers[0].hear(time.monotonic() + LATE_S)
        assert watchers[0].lost == set(range(1, RANKS)), "all at once: what is told of one shows the next"


def live_through(watchers, pid):
    began, used = time.monotonic(), psutil.Process(pid).cpu_times()
    until = began + LASTS_S
    healthy = [threading.Thread(target=watchers[rank].hear, args=(until,)) for rank in range(HALF)]
    for thread in healthy:
        thread.start()
    watchers[HALF].line.sendall(b'{"kind": "alive", "te')
    watchers[GARBAGE].line.sendall(os.urandom(1 << 16) + b"\n")
    some = b'{"kind": "alive"}\n' * 1000
    while time.monotonic() < until:
        watchers[FLOOD].line.sendall(some)
        time.sleep(0.1)
    for thread in healthy:
        thread.join()
    for rank in range(HALF):
        assert watchers[rank].lost == {HALF, GARBAGE}
        assert max(watchers[rank].gaps) < LATE_S
    now = psutil.Process(pid).cpu_times()
    assert now.user + now.system - used.user - used.system < LASTS_S / 2, "ten thousand messages a second"
