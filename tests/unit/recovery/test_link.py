"""The local line: whole packets, descriptors, and an end that is seen."""

import os
import socket

import pytest

from everstep.clock import SYSTEM
from everstep.process.loop import Loop
from everstep.recovery.line import Line
from everstep.recovery.link import MAX_MESSAGE, MAX_PACKET, Link, LinkClosed


@pytest.fixture
def ends():
    ours, theirs = Link.pair()
    other = Link.from_fd(os.dup(theirs.fileno()))
    theirs.close()
    yield ours, other
    ours.close()
    other.close()


def test_messages_stay_whole_and_in_order(ends):
    ours, other = ends
    for number in range(20):
        ours.send({"kind": "x", "n": number, "text": "é" * number})
    assert [other.receive()[0]["n"] for _ in range(20)] == list(range(20))


def test_a_descriptor_goes_along(ends):
    ours, other = ends
    reader, writer = os.pipe()
    ours.send({"kind": "x"}, [writer])
    os.close(writer)
    _, (got,) = other.receive()
    os.write(got, b"hello")
    os.close(got)
    assert os.read(reader, 10) == b"hello"
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_the_end_of_the_other_side_is_seen(ends):
    ours, other = ends
    ours.shutdown()
    with pytest.raises(LinkClosed):
        other.receive()
    with pytest.raises(LinkClosed):
        other.send({"kind": "x"})


def test_the_last_words_of_one_who_closes_without_reading_are_heard(ends):
    """The kernel reports the reset before it hands over what was sent (a finished worker was taken for an orphan)."""
    ours, other = ends
    ours.send({"kind": "unread"})
    other.send({"kind": "first"})
    other.send({"kind": "last"})
    other.close()
    assert [ours.receive()[0]["kind"] for _ in range(2)] == ["first", "last"]
    with pytest.raises(LinkClosed):
        ours.receive()


def test_what_is_too_large_is_refused_before_it_is_sent(ends):
    ours, _ = ends
    with pytest.raises(ValueError, match="pass a descriptor instead"):
        ours.send({"kind": "big", "text": "x" * MAX_MESSAGE})


def test_a_message_larger_than_a_packet_arrives_with_its_descriptors(ends):
    ours, other = ends
    reader, writer = os.pipe()
    ours.send({"kind": "big", "text": "x" * MAX_PACKET}, [writer])
    os.close(writer)
    message, (got,) = other.receive()
    assert message["text"] == "x" * MAX_PACKET
    os.close(got)
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize("packet", [b"@", b"[1]", b"nonsense", b"\xff\xfe", b"@@"])
def test_what_is_no_message_is_said_and_keeps_no_descriptor(ends, packet):
    ours, other = ends
    reader, writer = os.pipe()
    socket.send_fds(ours._end, [packet], [writer])
    os.close(writer)
    with pytest.raises(ValueError, match=r".+"):
        other.receive()
    assert os.read(reader, 1) == b""  # nobody has its other end any more
    os.close(reader)
    ours.send({"kind": "x"})
    assert other.receive() == ({"kind": "x"}, [])


def test_a_full_line_does_not_block(ends):
    ours, _ = ends
    ours.setblocking(False)

    def fill() -> None:
        for _ in range(10_000):
            ours.send({"kind": "x", "text": "y" * 1000})

    with pytest.raises(BlockingIOError):
        fill()


def test_a_line_may_be_closed_by_whoever_hears_of_its_end_while_it_is_being_closed():
    """The kernel may tell of a process's end before it tells of its line's."""
    loop = Loop(SYSTEM)
    ours, theirs = Link.pair()
    Link(theirs).send({"kind": "last"})
    theirs.close()
    said = []
    line = Line(loop, ours, lambda message, fds: said.append(message["kind"]), lambda: line.close())
    line.close()
    assert (said, line.open) == (["last"], False)
    loop.close()
