"""What no writer has read is hashed when there is time: beside whatever the worker does, and never falsely."""

import os
import random

import pytest
import torch
import xxhash

from everstep.checkpoint import hasher as hasher_module
from everstep.checkpoint import shelf as shelf_module
from everstep.checkpoint.core import idle, segment
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.segment import HEADER_BYTES, Header, checksum_of, unseal
from everstep.checkpoint.hasher import Hasher
from everstep.checkpoint.hashing import ENTRY, MOST_DEATHS, Hashing
from everstep.checkpoint.shelf import Shelf
from everstep.errors import DamagedCheckpoint
from everstep.events import Notice
from everstep.recovery.link import Link
from everstep.testing.loopback import LoopbackHost


class Box:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Still:
    """A clock that stands: how long hashing takes here decides nothing."""

    def now(self):
        return 0.0


class Child:
    """A helper in this process."""

    name, pid = "hasher", 1

    def __init__(self):
        self.link, theirs = Link.pair()
        self.hasher = Hasher(Link(theirs), Still())

    def send(self, message, fds=()):
        self.link.send(message, fds)

    def turn(self):
        """Hear what was said, and hash once."""
        while self.hasher._poll.poll(0):
            self.hasher._heard(*self.hasher._link.receive())
        self.hasher.turn()

    def close(self):
        self.link.close()
        for mapped in self.hasher._watched.values():
            mapped.close()
        self.hasher._link.close()


class Host:
    def __init__(self):
        self.children, self.events = [], []

    def spawn(self, name, entry, arguments):
        assert (entry, arguments) == (ENTRY, {})
        self.children.append(Child())
        return self.children[-1]

    def emit(self, event):
        self.events.append(event)


@pytest.fixture
def riding(bench):
    """Let a companion ride beside a bench's shelf."""
    hosts = []

    def ride(b):
        host, companion = Host(), Hashing(b.shelf)
        companion.start(host)
        hosts.append(host)
        return companion, host

    yield ride
    for host in hosts:
        for child in host.children:
            child.close()


def begin(bench, riding, size=1, elements=1000):
    b = bench(size)
    companion, host = riding(b)
    workers = b.enter()
    boxes = [Box(torch.arange(elements, dtype=torch.float32) + rank) for rank in range(size)]
    for worker, box in zip(workers, boxes, strict=True):
        worker.bind({"box": box})
    return b, workers, boxes, companion, host


def hashed(b):
    """Return (rank, step) of all copies that are hashed, rightly."""
    found = set()
    for each in b.shelf._sets.values():
        for one in each.segments.values():
            header = one.header()
            expected = checksum_of(one._map, header) if isinstance(header, Header) else None
            if expected is not None:
                payload = one._map[header.payload_offset :][: header.payload_bytes]
                assert xxhash.xxh3_64_intdigest(payload) == expected, "a checksum of something else"
                found.add((header.rank, header.step))
    return found


def test_the_newest_two_of_each_rank_are_hashed_when_there_is_time(bench, riding):
    b, workers, _, _, host = begin(bench, riding, size=2)
    (child,) = host.children
    child.turn()
    assert hashed(b) == set()
    for step in (1, 2, 3):
        for worker in workers:
            worker.take(step)
    child.turn()
    assert hashed(b) == {(rank, step) for rank in (0, 1) for step in (2, 3)}
    workers[0].take(4)
    child.turn()
    assert hashed(b) >= {(0, 4), (0, 3), (1, 3), (1, 2)}


@pytest.mark.parametrize("at", [0, 1700, 3999])
def test_a_byte_that_flips_after_it_is_found_at_the_restore_and_an_older_step_taken(bench, riding, at):
    """CL-17 a: no writer has read this copy, and a restore from memory compares all the same."""
    b, (worker,), (box,), _, host = begin(bench, riding)
    for step in (1, 2, 3):
        box.value.add_(1)
        worker.take(step)
    host.children[0].turn()
    newest = max((s.step, s.buffer) for s in b.shelf.sealed())[1]
    b.shelf._segment(0, newest)._map[HEADER_BYTES + at] ^= 1
    (worker,) = b.enter()
    worker.bind({"box": Box(torch.zeros(1000))})
    with pytest.raises(DamagedCheckpoint, match="bytes were changed in memory"):
        worker.restore()
    (worker,) = b.enter()
    again = Box(torch.zeros(1000))
    worker.bind({"box": again})
    assert worker.restore().step == 2
    assert again.value.equal(torch.arange(1000, dtype=torch.float32) + 2)


def test_a_snapshot_that_is_written_over_while_it_is_hashed_is_not_hashed_and_less_is_tried(bench, riding, monkeypatch):
    monkeypatch.setattr(hasher_module, "PIECE", 512)
    b, (worker,), (box,), _, host = begin(bench, riding)
    worker.take(1)
    child, step = host.children[0], iter(range(2, 1000))
    digests = xxhash.xxh3_64

    class Slow:
        def __init__(self):
            self._digest = digests()

        def update(self, piece):
            self._digest.update(piece)
            box.value.add_(1)
            worker.take(next(step))

        def intdigest(self):
            return self._digest.intdigest()

    monkeypatch.setattr(hasher_module.xxhash, "xxh3_64", Slow)
    rests = []
    for _ in range(8):
        child.turn()
        rests.append(child.hasher._rest_s)
    assert hashed(b) == set()
    assert rests == sorted(rests)
    assert rests[-1] == idle.MOST_S
    monkeypatch.setattr(hasher_module.xxhash, "xxh3_64", digests)
    child.turn()
    assert len(hashed(b)) == 2
    assert child.hasher._rest_s == idle.LOOK_S


@pytest.mark.parametrize("seed", range(20))
def test_a_checksum_that_comes_late_is_nobody_s(bench, riding, seed):
    """Between the last look and the checksum's words anything happens: more steps, or a rollback that counts anew."""
    b, (worker,), (box,), _, host = begin(bench, riding)
    rng = random.Random(seed)
    for step in range(1, rng.randint(2, 6)):
        worker.take(step)
    put = segment.put_checksum
    done = []

    def late(head, header, digest):
        nonlocal worker
        if not done:
            done.append(header)
            if rng.random() < 0.5:
                _, sequence = max((s.step, s.buffer) for s in b.shelf.sealed())
                unseal(b.shelf._segment(0, sequence)._map)
                (worker,) = b.enter(replace=(0,))
                worker.bind({"box": box})
            for step in range(100, 100 + rng.randint(1, 5)):
                box.value.add_(1)
                worker.take(step)
        put(head, header, digest)

    hasher_module.segment.put_checksum = late
    try:
        host.children[0].turn()
    finally:
        hasher_module.segment.put_checksum = put
    assert done
    hashed(b)
    for one in b.shelf._sets.values():
        for each in one.segments.values():
            header = each.header()
            assert isinstance(header, str) or segment.wound(each._map, header) == "", "a good copy would be refused"


def test_two_snapshots_of_one_sequence_have_different_marks():
    """A rollback lets a buffer's sequence come again, with another lineage."""
    base = Header(7, 41, 0, 0, -1, 0, 1, 1000, 10)
    other = Header(7, 41, 0, 1, 40, 0, 1, 1000, 10)
    buffer = bytearray(8192)
    segment.write(buffer, other, b"0123456789")
    segment.seal(buffer, 7)
    segment.put_checksum(buffer, base, 12345)
    assert checksum_of(buffer, segment.parse(buffer)) is None


def test_memory_that_was_outgrown_is_let_go_of(bench, riding):
    b, (worker,), (box,), _, host = begin(bench, riding)
    worker.take(1)
    child = host.children[0]
    child.turn()
    first = set(child.hasher._watched)
    box.value = torch.zeros(100_000)
    for step in range(2, 8):
        worker.take(step)
    child.turn()
    assert len(child.hasher._watched) == len(first)
    assert not first & child.hasher._watched.keys()
    assert hashed(b) >= {(0, 7), (0, 6)}


def test_a_hasher_that_dies_is_begun_again_and_not_for_ever(bench, riding):
    b, (worker,), _, companion, host = begin(bench, riding)
    worker.take(1)
    companion.on_child_exit(host.children[0], -9)
    host.children[1].turn()
    assert hashed(b) == {(0, 1)}
    companion.on_child_exit(host.children[0], -9)  # an old one: it was heard of already
    assert len(host.children) == 2
    for _ in range(MOST_DEATHS):
        companion.on_child_exit(host.children[-1], -9)
    assert len(host.children) == MOST_DEATHS
    (notice,) = [event for event in host.events if isinstance(event, Notice)]
    assert "by signal 9" in notice.text
    worker.take(2)  # and training goes on


def test_it_holds_up_nothing_and_ends_with_a_completed_job(bench, riding):
    _, _, _, companion, host = begin(bench, riding)
    assert companion.drained(False)
    child = host.children[0]
    child.turn()
    assert child.hasher.hear(0.0)
    assert companion.drained(True)
    assert not child.hasher.hear(0.0)
    companion.on_child_exit(host.children[0], -9)
    assert len(host.children) == 1
    assert companion.problems() == ()
    assert companion.on_roster(None) == {}


def test_many_buffers_go_in_packets_that_a_line_takes(monkeypatch, riding):
    monkeypatch.setattr(shelf_module, "ROTATING", 70)
    tier = Shelf(look=lambda: Memory(8 << 30))
    companion, host = Hashing(tier), Host()
    companion.start(host)
    loop = LoopbackHost(tier)
    loop.enter()
    loop.receivers[0] = lambda message, fds: [os.close(fd) for fd in fds]
    tier.on_message(0, {"kind": "snapshot.attach", "ask": 1, "bytes": 8192, "have": []}, ())
    loop.settle()
    host.children[0].turn()
    assert len(host.children[0].hasher._watched) == 71
    host.children[0].close()
    tier.close()


def test_it_ends_with_its_line():
    child = Child()
    child.link.shutdown()
    assert not child.hasher.hear(0.0)
    child.close()
