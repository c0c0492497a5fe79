"""Porters as real processes over real sockets: what arrives is whole and hashed, or it never counts.

Each test forks its own porters from this process, kills or stops them at any point, and looks at the memory that was
to be received into, as the agent does.
"""

import os
import random
import signal
import socket
import time

import pytest

from everstep.checkpoint import porter
from everstep.checkpoint.core import segment
from everstep.checkpoint.core.segment import HEADER_BYTES, Header
from everstep.checkpoint.segments import Segment
from everstep.testing.forked_writers import ForkedWriter
from everstep.testing.states import rank_state, snapshot

pytestmark = pytest.mark.procs
LIMIT_S = 60.0


class Node:
    """A porter, and what it has said."""

    def __init__(self, number):
        self.child = ForkedWriter(f"porter-{number}", number, lambda link: porter.main(link, address="127.0.0.1"))
        self.said = {}
        self.port = self.hear("door")["port"]

    def hear(self, kind, transfer=None, limit_s=LIMIT_S):
        """Wait for a word; None where the porter is gone."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for at, message in self.said.items():
                if message["kind"] in kind.split("|") and transfer in (None, message.get("transfer")):
                    return self.said.pop(at)
            got = self.child.receive(max(0.1, deadline - time.monotonic()))
            if got is None:
                return None
            self.said[len(self.said) + random.random()] = got[0]
        raise AssertionError(f"{kind} was not said in {limit_s} s; said: {list(self.said.values())}")

    def expect(self, into, transfer="t", ticket=None, beside=()):
        ticket = ticket or random.randbytes(32).hex()
        self.child.send({"kind": "expect", "transfer": transfer, "ticket": ticket}, [into.fd, *beside])
        self.hear("expecting", transfer)
        return ticket

    def send(self, fd, to, ticket, transfer="s", step=7, rank=0):
        what = {"rank": rank, "step": step, "epoch": 0, "generation": 0}
        where = {"host": "127.0.0.1", "port": to, "ticket": ticket}
        self.child.send({"kind": "send", "transfer": transfer, **where, **what}, [fd])


@pytest.fixture
def nodes():
    made = []

    def make(count=2):
        made.extend(Node(n) for n in range(count))
        return made[-count:]

    yield make
    for node in made:
        node.child.kill()
        node.child.close()


@pytest.fixture
def memory():
    fds, segments = [], []

    def make(size):
        segments.append(Segment("test", size))
        segments[-1].allocate(size)
        return segments[-1]

    def sealed(rank=0, step=7, rows=4):
        fds.append(snapshot(rank_state(rank, 2, step, rows=rows), step))
        return fds[-1]

    make.sealed = sealed
    yield make
    for fd in fds:
        os.close(fd)
    for one in segments:
        one.close()


def content(fd):
    return os.pread(fd, os.fstat(fd).st_size, 0)


def test_a_snapshot_arrives_whole_and_both_copies_are_hashed(nodes, memory):
    a, b = nodes()
    source, into = memory.sealed(), memory(64 << 10)
    a.send(source, b.port, b.expect(into))
    assert b.hear("received|refused")["kind"] == "received"
    assert a.hear("sent|refused")["kind"] == "sent"
    sent, kept = content(source), content(into.fd)
    header = into.header()
    assert isinstance(header, Header)
    assert kept[: len(sent)] == sent
    assert segment.checksum_of(kept, header) == segment.checksum_of(sent, segment.parse(sent)) is not None
    assert header.step == 7


def test_a_checksum_that_somebody_left_is_compared_and_a_flipped_byte_named(nodes, memory):
    a, b = nodes()
    source, into = memory.sealed(), memory(64 << 10)
    a.send(source, b.port, b.expect(into))
    assert b.hear("received|refused")["kind"] == "received"
    (byte,) = os.pread(source, 1, HEADER_BYTES + 40)
    os.pwrite(source, bytes([byte ^ 4]), HEADER_BYTES + 40)
    again = memory(64 << 10)
    a.send(source, b.port, b.expect(again, "u"), "v")
    told = b.hear("received|refused", "u")
    assert "damaged: its payload has checksum" in told["text"]
    assert "the receiver refuses it: damaged" in a.hear("refused", "v")["text"]
    assert again.header() == "void: not sealed"


@pytest.mark.parametrize("harm", ["none", "another step", "a byte", "void", "no description"])
def test_what_a_rank_there_has_is_not_sent_and_all_is_sent_where_it_is_not_the_same(nodes, memory, harm):
    a, b = nodes()
    rows = 2048  # of 32 bytes: 64 KiB of a shard, 64 KiB that all ranks have
    source, into = memory.sealed(rank=0, rows=rows), memory(256 << 10)
    beside = memory.sealed(rank=1, rows=rows, step=8 if harm == "another step" else 7)
    header = segment.parse(content(beside))
    layout = rank_state(1, 2, 7, rows=rows).layout
    bias = next(leaf for leaf in layout.leaves() if leaf.path == "model/bias")
    if harm == "a byte":
        os.pwrite(beside, bytes([os.pread(beside, 1, HEADER_BYTES + bias.offset)[0] ^ 1]), HEADER_BYTES + bias.offset)
    elif harm == "void":
        os.pwrite(beside, bytes(16), 8)
    elif harm == "no description":
        os.pwrite(beside, b"{", header.meta_offset + 4)
    a.send(source, b.port, b.expect(into, beside=[beside]))
    kept, sent = b.hear("received|refused"), a.hear("sent|refused")
    assert (kept["kind"], sent["kind"]) == ("received", "sent")
    whole = content(source)
    assert content(into.fd)[: len(whole)] == whole
    least, most = {"none": (0, len(whole) - bias.nbytes), "a byte": (len(whole) + 1, 2 * len(whole))}.get(
        harm, (len(whole), len(whole))
    )
    assert least <= kept["bytes"] == sent["bytes"] <= most


def test_what_is_not_the_snapshot_that_was_to_be_sent_is_not_sent(nodes, memory):
    a, b = nodes()
    into = memory(64 << 10)
    a.send(memory.sealed(step=8), b.port, b.expect(into), step=7)
    assert "holds step 8 of rank 0" in a.hear("refused")["text"]


def test_nobody_gets_in_without_a_ticket_nor_twice_with_one(nodes, memory):
    a, b = nodes()
    source, into = memory.sealed(), memory(64 << 10)
    a.send(source, b.port, "ab" * 32, "wrong")
    assert a.hear("refused", "wrong")["text"]
    ticket = b.expect(into)
    a.send(source, b.port, ticket, "first")
    assert b.hear("received|refused", "t")["kind"] == "received"
    before = content(into.fd)
    a.send(source, b.port, ticket, "second")
    assert a.hear("refused", "second")["text"]
    assert content(into.fd) == before


def test_garbage_and_half_a_greeting_change_nothing_and_end(nodes, memory):
    a, b = nodes()
    into = memory(64 << 10)
    ticket = b.expect(into)
    draw = random.Random(3)
    strangers = []
    greetings = (b"EVERPEER", b"EVERPEER" + draw.randbytes(40))
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", draw.randbytes(4096), *greetings):
        stranger = socket.create_connection(("127.0.0.1", b.port))
        stranger.sendall(garbage)
        strangers.append(stranger)
    source = memory.sealed()
    a.send(source, b.port, ticket)
    assert b.hear("received|refused", "t")["kind"] == "received"
    for stranger in strangers:
        stranger.close()


def test_one_who_has_the_ticket_and_sends_nonsense_is_refused_and_leaves_nothing(nodes, memory):
    (b,) = nodes(1)
    whole = content(memory.sealed())
    begins = segment.parse(whole).meta_offset
    elsewhere = whole[:80] + bytes([255]) + whole[81:]  # where its payload begins
    for length, body, text in (
        (1 << 40, b"", "are announced, for memory of"),
        (8192, b"x" * 8192, "damaged: not a snapshot buffer"),
        (len(whole), whole[:4000], f"gone after 4000 of {HEADER_BYTES} bytes"),
        (len(whole), whole[:HEADER_BYTES] + b"x", f"the sender has gone at byte {begins + 1} of {len(whole)}"),
        (len(whole) + 1, whole, f"{len(whole) + 1} bytes came, where its header says {len(whole)}"),
        (len(whole), elsewhere, "which cannot be"),
    ):
        into = memory(64 << 10)
        ticket = b.expect(into, text)
        with socket.create_connection(("127.0.0.1", b.port)) as line:
            line.sendall(porter.HELLO.pack(porter.MAGIC, bytes.fromhex(ticket), length) + body)
            line.shutdown(socket.SHUT_WR)
            assert text in b.hear("refused", text)["text"]
        assert into.header() == "void: not sealed"


def test_what_is_not_wanted_any_more_is_told_whether_somebody_has_come_or_not(nodes, memory):
    (b,) = nodes(1)
    into = memory(64 << 10)
    b.expect(into, "nobody")
    b.child.send({"kind": "forget", "transfer": "nobody"})
    assert b.hear("refused", "nobody")["text"] == "nobody has come to send it"
    ticket = b.expect(into, "slow")
    with socket.create_connection(("127.0.0.1", b.port)) as line:
        line.sendall(porter.HELLO.pack(porter.MAGIC, bytes.fromhex(ticket), 60_000))
        b.hear("begun", "slow")
        b.child.send({"kind": "forget", "transfer": "slow"})
        assert b.hear("refused", "slow")["text"]
    assert into.header() == "void: not sealed"


def test_nobody_at_the_other_end_is_told(nodes, memory):
    (a,) = nodes(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    a.send(memory.sealed(), port, "ab" * 32)
    assert a.hear("refused")["text"] == "Connection refused"


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("seed", range(4))
def test_a_porter_that_is_killed_in_the_midst_leaves_no_copy_that_counts(nodes, memory, who, seed):
    kill_in_the_midst(nodes, memory, who, seed)


@pytest.mark.long
@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("seed", range(100, 220))
def test_a_porter_that_is_killed_at_any_point(nodes, memory, who, seed):
    kill_in_the_midst(nodes, memory, who, seed)


def kill_in_the_midst(nodes, memory, who, seed):
    a, b = nodes()
    source = memory.sealed(rows=200_000)  # some 13 MB
    into = memory(os.fstat(source).st_size + 4096)
    a.send(source, b.port, b.expect(into))
    b.hear("begun")
    time.sleep(random.Random(seed).random() * 0.02)
    (a if who == "sender" else b).child.kill()
    if who == "sender":
        told = b.hear("received|refused")
        if told["kind"] == "refused":
            assert into.header() == "void: not sealed"
        else:
            assert content(into.fd)[: os.fstat(source).st_size] == content(source)
    else:
        told = a.hear("sent|refused")
        header = into.header()  # what it left is void, or whole
        if isinstance(header, Header):
            assert segment.wound(content(into.fd), header) == ""
        else:
            assert header.startswith("void")
            assert told["kind"] == "refused"


def test_one_that_stands_still_is_given_up_after_a_stated_time(nodes, memory, monkeypatch):
    monkeypatch.setattr(porter, "SILENCE_S", 1.0)  # before the fork
    a, b = nodes()
    source = memory.sealed(rows=400_000)
    into = memory(os.fstat(source).st_size + 4096)
    ticket = b.expect(into)
    os.kill(b.child.pid, signal.SIGSTOP)
    try:
        a.send(source, b.port, ticket)
        assert "1 s" in a.hear("refused|sent")["text"]
    finally:
        os.kill(b.child.pid, signal.SIGCONT)
    assert b.hear("refused|received", "t")["kind"] == "refused"
    assert into.header() == "void: not sealed"


def test_a_porter_ends_with_its_line_in_the_midst_of_everything(nodes, memory):
    a, b = nodes()
    source = memory.sealed(rows=200_000)
    into = memory(os.fstat(source).st_size + 4096)
    a.send(source, b.port, b.expect(into))
    b.child.link.close()
    assert b.child.wait() == 0
    assert a.hear("refused|sent")["kind"] in ("refused", "sent")
