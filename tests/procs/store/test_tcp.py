"""TcpStore and a healthy host."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from everstep.errors import StoreError, StoreTimeout
from everstep.recovery.link import LinkClosed
from everstep.store import keys
from everstep.store.connection import Connection
from everstep.store.probe import probe
from everstep.store.tcp import TcpStore
from everstep.testing.conformance import STORE_CHECKS

pytestmark = pytest.mark.procs


@pytest.fixture
def opened(shared_host):
    """Open connections to the shared host, and close them all."""
    stores = []

    def make(**options):
        stores.append(TcpStore.open(shared_host.address, shared_host.port, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("everstep-guard")]


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_conforms(check, opened):
    check(opened)


def test_raw_edges_that_the_rules_are_made_for(shared_host):
    """E5: compare_set on a missing key with an expected value reads like success; an empty value counts as missing."""
    connection = Connection.open(shared_host.address, shared_host.port)
    client = connection.client
    assert client.compare_set("raw/a", "zz", "y") == b"zz"
    assert not client.check(["raw/a"])
    client.set("raw/empty", "")
    assert client.compare_set("raw/empty", "", "y") == b"y"
    connection.close()


def test_a_waiting_connection_blocks_no_other(opened):
    """E4: one thread waits on its connection while another writes on its own."""
    ours, theirs = opened(), opened()
    began, took = threading.Event(), []

    def wait():
        ours.get("e4/x")
        began.set()
        with pytest.raises(StoreError, match="severed"):
            ours.wait(["e4/never"], timeout_s=20)

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(5)
    start = time.monotonic()
    theirs.set("e4/a", b"1")
    took.append(time.monotonic() - start)
    ours.sever()
    thread.join(5)
    assert took[0] < 0.5


def test_severing_ends_init_process_group_s_kind_of_wait_at_once(shared_host):
    """E3: a raw client, as process groups get one, ends within milliseconds of being severed."""
    import torch.distributed as dist

    connection = Connection.open(shared_host.address, shared_host.port)
    ended = []

    def wait():
        try:
            dist.PrefixStore("0/1", connection.client).get("e3/never")
        except RuntimeError:
            ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    severed = time.monotonic()
    connection.sever()
    thread.join(5)
    connection.close()
    assert ended
    assert ended[0] - severed < 0.5


def test_a_fork_neither_uses_nor_hurts_its_parent_s_connection(opened):
    store = opened()
    store.set("fork/a", b"1")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store.get("fork/a")
        except StoreError as error:
            code = 0 if "before a fork" in str(error) else 2
        store.close()
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.get("fork/a") == b"1"


def test_64_readers_of_a_roster(opened):
    """E7 in small: 40 bytes for each of 4,096 ranks, read by 64 connections."""
    roster = os.urandom(40 * 4096)
    stores = [opened() for _ in range(8)]
    stores[0].set("e7/roster", roster)
    start = time.monotonic()
    for store in stores * 8:
        assert store.get("e7/roster") == roster
    assert time.monotonic() - start < 5


def test_exit_with_a_waiting_daemon_thread_is_clean(shared_host):
    """E8: a daemon thread inside `wait` when the interpreter ends made it abort (134). Closed first, it does not."""
    code = f"""
    import threading
    from everstep.store.tcp import TcpStore
    store = TcpStore.open({shared_host.address!r}, {shared_host.port})
    began = threading.Event()
    def wait():
        began.set()
        try:
            store.wait(["e8/never"], timeout_s=60)
        except Exception:
            pass
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    began.wait()
    store.close()
    thread.join()
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0


def test_the_host_says_that_its_port_is_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = start(port=port)
        assert host.said["kind"] == "store.failed"
        assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in host.said["text"]
        assert "choose another port" in host.said["text"]
        assert host.ends()


def test_the_host_listens_on_its_address_alone_and_ends_with_its_line(start):
    host = start()
    assert host.said == {"kind": "store.ready", "host": "127.0.0.1", "port": host.port}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", host.port), 1).close()
    began = time.monotonic()
    host.link.shutdown()
    assert host.ends()
    assert time.monotonic() - began < 2
    with pytest.raises(LinkClosed):
        host.link.receive()


def test_after_200_generations_the_host_holds_the_keys_of_one(start):
    """Told that a generation has begun, it forgets those before; what comes late goes the next time."""
    host = start()
    store, raw = TcpStore.open(host.address, host.port), Connection.open(host.address, host.port)
    for foreign in ("mine", "0/3/of the script", "everstep/hub/none/0/0"):
        store.set(foreign, b"1")
    counts = []
    for generation in range(200):
        for rank in range(8):
            store.set(f"{keys.place(0, generation)}/default_pg/0//{rank}", b"an address")
        if generation:
            store.set(f"{keys.place(0, generation - 1)}/from a thread that was left behind", b"1")
        host.link.send({"kind": "store.forget", "epoch": 0, "generation": generation})
        deadline = time.monotonic() + 20
        while any(keys.past(key, 0, generation) for key in store.list("everstep/")):
            assert time.monotonic() < deadline
        counts.append(raw.client.num_keys())
    assert set(counts) == {counts[0]}
    assert {"mine", "0/3/of the script", "everstep/hub/none/0/0"} < set(store.list())
    store.close()
    raw.close()


def test_a_key_that_comes_and_goes_is_read_without_a_wait(opened):
    """A look, and then torch's own `get`, would wait for one that was deleted in between, until the deadline."""
    ours, theirs = opened(timeout_s=20), opened()
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            theirs.set("comes/a", b"1")
            theirs.delete("comes/a")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        seen = {ours.get("comes/a") for _ in range(2000)}
    finally:
        over.set()
        thread.join(20)
    assert seen <= {None, b"1"}


def test_what_is_not_a_store_is_told():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StoreTimeout, match=r"within 0\.2 s"):
            probe("127.0.0.1", port, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer(words):
            line, _ = other.accept()
            line.recv(64)
            line.sendall(words)
            line.close()

        for words, mend in ((b"HTTP/1.1 400", "not as torch's TCPStore"), (b"", "something else listens")):
            thread = threading.Thread(target=answer, args=(words,))
            thread.start()
            with pytest.raises(StoreError, match=mend):
                probe("127.0.0.1", port, 5)
            thread.join(5)
    with pytest.raises(StoreError, match=r"cannot be reached.*is its host running"):
        probe("127.0.0.1", port, 1)
    with pytest.raises(StoreError, match="cannot be reached"):
        probe("no-such-host.invalid", port, 5)


def test_hundreds_of_opens_leave_no_descriptor(shared_host):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        store = TcpStore.open(shared_host.address, shared_host.port)
        store.set("many/a", b"1")
        store.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
