"""Reading by way of another: the same bytes, the same errors, and one who never answers is an error too."""

import os
import threading

import pytest

from everstep.checkpoint.core import names
from everstep.checkpoint.reading_beside import BLOCK, WINDOW, Beside, Readers, serve
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.posix import Eyes, PosixReading
from everstep.checkpoint.unreachable import failure
from everstep.clock import SystemClock
from everstep.errors import CheckpointError, UnreachableStorage
from everstep.recovery.link import Link

SIZE = WINDOW + 3 * BLOCK + 12_345


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / names.committed(3)
    folder.mkdir()
    (folder / names.MANIFEST).write_bytes(b"the manifest" * 500_000)
    (folder / "data").write_bytes(os.urandom(SIZE))
    return str(folder)


@pytest.fixture
def door():
    """A reader, as a thread of this process, and what it has to say of its end."""
    ours, theirs = Link.pair()
    link = Link(theirs)

    def served():
        serve(link)
        link.close()

    thread = threading.Thread(target=served)
    thread.start()
    yield os.dup(ours.fileno())
    ours.shutdown()
    ours.close()
    thread.join()


def read(source, name, offset, count):
    """As `load` does: until it is full, or the file ends."""
    made, done = bytearray(count), 0
    with memoryview(made) as view:
        while done < count and (got := source.read_into(name, view[done:], offset + done)):
            done += got
    return bytes(made[:done])


def test_it_reads_what_the_file_holds(place, door):
    beside, plain = Beside(door, 60.0), PosixReading(place)
    there = beside(place)
    assert there.manifest() == plain.manifest()
    assert (there.size("data"), there.size("none")) == (SIZE, None)
    for offset in (0, 1, BLOCK - 3, BLOCK, WINDOW - 7, SIZE - 5, SIZE, SIZE + BLOCK):
        for count in (0, 1, 10, BLOCK // 2, BLOCK + 1, WINDOW + 9):
            assert read(there, "data", offset, count) == read(plain, "data", offset, count), (offset, count)
    there.close()
    plain.close()
    beside.close()


class Stingy(Eyes):
    """What a page behind it that cannot be had, a signal or a FUSE makes of a read: less than was asked for."""

    def read(self, fd, into, offset):
        return super().read(fd, into[:4099], offset)


def test_a_read_that_gives_less_is_not_the_end_of_the_file(place, door, monkeypatch):
    """A short read of a block must not be kept as the whole of it: what is behind it is there."""
    monkeypatch.setattr(opening, "reading", lambda path: PosixReading(path, Stingy()))
    beside, plain = Beside(door, 60.0), PosixReading(place)
    there = beside(place)
    for offset, count in ((0, 100), (5000, 100), (BLOCK - 50, 100), (SIZE - 20_000, 20_000), (7, WINDOW)):
        assert there.read_into("data", memoryview(bytearray(count)), offset) > 0
        assert read(there, "data", offset, count) == read(plain, "data", offset, count), (offset, count)
    there.close()
    plain.close()
    beside.close()


def test_threads_each_have_a_conversation_of_their_own(place, door):
    beside, plain = Beside(door, 60.0), PosixReading(place)
    there, wrong = beside(place), []

    def some(start):
        for offset in range(start, SIZE, 1_000_003):
            there_and_here = [(read(there, "data", offset, n), read(plain, "data", offset, n)) for n in (100, BLOCK)]
            wrong.extend(offset for found, expected in there_and_here if found != expected)

    threads = [threading.Thread(target=some, args=(n * 77,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    plain.close()
    beside.close()


def test_what_is_wrong_there_is_said_here(place, door):
    beside = Beside(door, 60.0)
    with pytest.raises(FileNotFoundError) as caught:
        beside(place).read_into("none", memoryview(bytearray(1)), 0)
    assert caught.value.filename.endswith("/none")
    with pytest.raises(FileNotFoundError):
        beside(place + "0").manifest()
    assert beside(place).size("data") == SIZE
    beside.close()


def test_one_that_does_not_answer_is_stuck_and_from_then_on_at_once(place):
    """What a frozen device makes of a reader: nothing comes, and nobody waits a second time."""
    ours, theirs = Link.pair()
    beside = Beside(os.dup(ours.fileno()), 0.2)
    ours.close()
    for _ in range(2):
        with pytest.raises(UnreachableStorage, match=r"step-3 does not answer: a read has not come back for 0\.2 s"):
            beside(place).manifest()
    beside.close()
    theirs.close()


class Agent:
    """Gives each rank that asks a door to one reader; or none."""

    def __init__(self, door=None):
        self.door, self.asked, self.readers = door, [], Readers(self.hear)

    def hear(self, message):
        self.asked.append(message)
        if self.door is not None:
            self.readers.on_message({"kind": "disk.door", "ask": message["ask"]}, [os.dup(self.door)])


def test_a_rank_is_given_its_reader_by_its_agent_and_waits_for_none_for_ever(place, door):
    agent = Agent(door)
    late = os.dup(door)
    agent.readers.on_message({"kind": "disk.door", "ask": 0}, [late])  # for a generation that has ended
    beside = agent.readers.ask("disk")
    assert agent.asked == [{"kind": "disk.reader", "ask": 1}]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(late)
    assert read(beside(place), "data", 5, 10) == read(PosixReading(place), "data", 5, 10)
    beside.close()
    os.close(door)
    with pytest.raises(CheckpointError, match="the agent has given no process to read the local tier"):
        Agent().readers.ask("local", Hurrying())


class Hurrying(SystemClock):
    """A minute goes by at every look."""

    passed = 0.0

    def now(self):
        self.passed += 59.0
        return self.passed


def test_what_its_client_library_raises_is_no_damage(place, door, monkeypatch):
    def broken(self, name, into, offset):
        raise KeyError("a bug of theirs")

    monkeypatch.setattr(PosixReading, "read_into", broken)
    beside = Beside(door, 60.0)
    with pytest.raises(OSError, match="KeyError") as caught:
        beside(place).read_into("data", memoryview(bytearray(BLOCK)), 0)
    assert isinstance(failure("x", caught.value), UnreachableStorage)
    beside.close()


def test_one_that_is_gone_is_told(place):
    ours, theirs = Link.pair()
    beside = Beside(os.dup(ours.fileno()), 60.0)
    ours.close()
    theirs.close()
    with pytest.raises(CheckpointError, match="the process that reads checkpoints ended"):
        beside(place).manifest()
    beside.close()
