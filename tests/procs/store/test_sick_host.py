"""E1, E2, E9: hosts that are frozen, dead, or cut off. Every call ends at its deadline and says who and why."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from everstep.errors import StoreError, StoreTimeout
from everstep.store.connection import Connection, _construct
from everstep.store.probe import probe
from everstep.store.tcp import GRACE_S, TcpStore

pytestmark = pytest.mark.procs
LIMIT_S = 0.4
SLACK_S = 1.0  # the machine is shared
CALLS = {
    "get": lambda store: store.get("a"),
    "set": lambda store: store.set("a", b"2"),
    "create": lambda store: store.create("b", b"2"),
    "wait": lambda store: store.wait(["a", "never"]),
    "delete": lambda store: store.delete("a"),
    "list": lambda store: store.list(),
}


@pytest.fixture
def opened():
    stores = []

    def make(host, **options):
        stores.append(TcpStore.open(host.address, host.port, timeout_s=LIMIT_S, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def raw():
    """Open torch's own client, without a guard."""
    connections = []

    def make(host):
        connections.append(Connection.open(host.address, host.port))
        return connections[-1]

    yield make
    for connection in connections:
        connection.close()


def ends_at_its_deadline(do, limit_s=LIMIT_S, match="frozen"):
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=match):
        do()
    assert limit_s * 0.9 <= time.monotonic() - start < limit_s + SLACK_S


def test_a_frozen_host(start, opened):
    """E1: every call, and a new client, end at their deadline; another connection after the thaw is well."""
    host = start()
    stores = {name: opened(host) for name in CALLS}
    stores["get"].set("a", b"1")
    host.signal(signal.SIGSTOP)
    for name, call in CALLS.items():
        ends_at_its_deadline(lambda call=call, name=name: call(stores[name]), LIMIT_S + GRACE_S * (name == "wait"))
        with pytest.raises(StoreError, match="shut down after a late answer; open another"):
            stores[name].get("a")
    ends_at_its_deadline(lambda: opened(host, open_s=LIMIT_S))
    ends_at_its_deadline(lambda: _construct(host.address, host.port, LIMIT_S), match="took no client")
    host.signal(signal.SIGCONT)
    assert opened(host).create("after", b"thaw") == b"thaw"


def test_a_call_that_holds_the_interpreter_lock_is_ended_by_the_kernel(start, raw):
    """torch's list_keys lets no other thread of the process run while it waits."""
    host = start()
    connection = raw(host)
    connection.client.set("a", "1")
    host.signal(signal.SIGSTOP)
    began = time.monotonic()
    with connection.receive_limit(LIMIT_S), pytest.raises(RuntimeError):
        connection.client.list_keys()
    assert time.monotonic() - began < LIMIT_S + SLACK_S


def test_a_frozen_host_does_not_hold_calls_that_are_severed(start, opened):
    host = start()
    store = opened(host)
    store.get("a")
    host.signal(signal.SIGSTOP)
    threading.Timer(0.1, store.sever).start()
    began = time.monotonic()
    with pytest.raises(StoreError, match="severed"):
        store.get("a", timeout_s=30)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", CALLS)
def test_a_dead_host_is_reported_by_the_first_call(start, opened, name):
    """E2: a raw `set` after the death succeeds; ours does not."""
    host = start()
    store = opened(host)
    store.set("a", b"1")
    host.kill()
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"failed.*Whether a write stands is not known"):
        CALLS[name](store)
    assert time.monotonic() - began < LIMIT_S + SLACK_S
    with pytest.raises(StoreError, match="broken; open another"):
        store.get("a")
    with pytest.raises(StoreError, match="is its host running"):
        opened(host)


def test_what_the_rules_are_against(start, raw):
    """E2, raw: the first `set` to a dead host returns without an error. If this fails, torch has got better."""
    host = start()
    connection = raw(host)
    connection.client.set("a", "1")
    host.kill()
    with contextlib.suppress(RuntimeError):  # or it says so: seen once, with torch 2.11
        connection.client.set("a", "2")
    with pytest.raises(RuntimeError):
        connection.client.check(["a"])


def test_a_value_that_the_host_drops_is_refused_before_it_is_sent(start, opened):
    """E6: above 8 MiB the host hangs up; nothing above 1 MiB gets that far, and the connection lives."""
    host = start()
    store = opened(host)
    with pytest.raises(ValueError, match="pass a file"):
        store.set("a", bytes(9 << 20))
    store.set("a", b"1")
    assert store.get("a") == b"1"


def test_a_dead_host_s_port_is_free_though_its_agent_has_forked(start):
    """E9: the port belonged to the process that forked; ours belongs to a host that forks nothing."""
    host = start()
    pid = os.fork()  # an agent's child, alive while the host dies
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        host.kill()
        with pytest.raises(StoreError, match="cannot be reached"):
            probe(host.address, host.port, 1)
        again = start(port=host.port)
        assert again.said == {"kind": "store.ready", "host": "127.0.0.1", "port": host.port}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.long)])
def test_a_host_that_is_begun_again_on_its_port_serves_at_once_and_nobody_s_old_connection(start, times):
    """IR-14: eight clients come to each, and one from the first stays for ever; it and they meet no later host."""
    host = start()
    old = TcpStore.open(host.address, host.port)
    old.set("life", b"0")
    for life in range(1, times + 1):
        clients = [TcpStore.open(host.address, host.port) for _ in range(8)]
        assert {client.get("life") for client in clients} == {b"%d" % (life - 1)}
        host.kill()
        host = start(port=host.port)
        assert host.said == {"kind": "store.ready", "host": "127.0.0.1", "port": host.port}
        fresh = TcpStore.open(host.address, host.port)
        assert fresh.get("life") is None
        fresh.set("life", b"%d" % life)
        fresh.close()
        for client in (*clients, *[old] * (life == 1 or life == times)):
            with pytest.raises(StoreError):
                client.set("life", b"of another life")
        for client in clients:
            client.close()
    old.close()
    last = TcpStore.open(host.address, host.port)
    assert last.get("life") == b"%d" % times
    last.close()


def test_a_port_that_a_dead_host_s_child_keeps_alive_ends_the_probe(tmp_path):
    """E9, raw: the kernel still accepts for the child of a dead host. The probe finds out within its deadline."""
    code = """
    import os, signal, socket, sys
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        signal.pause()
    print(server.getsockname()[1], child, flush=True)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as agent:
        port, child = map(int, agent.stdout.readline().split())
        agent.wait(10)
    try:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port)).close()
        ends_at_its_deadline(lambda: TcpStore.open("127.0.0.1", port, open_s=LIMIT_S))
    finally:
        os.kill(child, signal.SIGKILL)


def ip(*words):
    return subprocess.run(["ip", *words], check=False, capture_output=True, text=True)


@pytest.fixture
def far(start):
    """A host in a network namespace of its own, at the other end of a veth link; `far.cut()` takes the link down."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs iproute2 and the right to make network namespaces")
    name = f"everstep{os.getpid()}"
    near, away = f"es{os.getpid() % 100000}a", f"es{os.getpid() % 100000}b"
    if ip("netns", "add", name).returncode != 0:
        pytest.skip("network namespaces cannot be made here")
    try:
        made = [
            ip("link", "add", near, "type", "veth", "peer", "name", away, "netns", name),
            ip("addr", "add", "10.213.77.1/30", "dev", near),
            ip("link", "set", near, "up"),
            ip("-n", name, "link", "set", "lo", "up"),
            ip("-n", name, "addr", "add", "10.213.77.2/30", "dev", away),
            ip("-n", name, "link", "set", away, "up"),
        ]
        if any(step.returncode for step in made):
            pytest.skip(f"a veth link cannot be made here: {[step.stderr for step in made if step.returncode]}")
        host = start(address="10.213.77.2", namespace=name)
        host.cut = lambda: ip("-n", name, "link", "set", away, "down")
        yield host
    finally:
        ip("netns", "del", name)
        ip("link", "del", near)


def test_a_link_that_goes_down(far, opened):
    """The host is well but unreachable: nothing is refused, nothing comes back; calls end at their deadline."""
    stores = {name: opened(far) for name in CALLS}
    stores["get"].set("a", b"1")
    assert far.cut().returncode == 0
    for name, call in CALLS.items():
        ends_at_its_deadline(lambda call=call, name=name: call(stores[name]), LIMIT_S + GRACE_S * (name == "wait"))
    with pytest.raises(StoreError):  # no route, or no answer
        opened(far, open_s=LIMIT_S)
