"""The line between two keepers: whole messages in order, nobody who has not the token, nobody waited for for ever."""

import json
import random
import socket
import struct

import pytest

from everstep.checkpoint import host_line
from everstep.checkpoint.core.hosts import BEAT_S, LOST_S
from everstep.checkpoint.host_line import Arrival, Greeting, HostLine, proof
from everstep.process.loop import Loop
from everstep.testing.nodes import StillClock


class Ends:
    """Two sides over one loop, which turns as often as it is told; time stands still."""

    def __init__(self):
        self.clock = StillClock()
        self.loop = Loop(self.clock)
        self.a, self.b = socket.socketpair()
        self.heard, self.ended = [], []

    def line(self, end, name):
        return HostLine(
            self.loop,
            end,
            lambda message, content: self.heard.append((name, message, content)),
            lambda why: self.ended.append((name, why)),
        )

    def turn(self, times=50):
        for _ in range(times):
            self.loop.later(0.0, lambda: None)
            self.loop.turn()

    def pass_time(self, seconds):
        for _ in range(int(seconds / BEAT_S)):
            self.clock.now_s += BEAT_S
            self.turn(3)


@pytest.fixture
def ends():
    made = Ends()
    yield made
    for end in (made.a, made.b):
        end.close()
    made.loop.close()


def frame(message, content=b"", size=None):
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!II", len(text) if size is None else size, len(content)) + text + content


def test_messages_arrive_whole_and_in_order_with_their_bytes_however_they_are_cut(ends):
    for end in (ends.a, ends.b):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one, other = ends.line(ends.a, "a"), ends.line(ends.b, "b")
    one.trust()
    other.trust()
    draw = random.Random(1)
    sent = [
        ({"kind": "x", "n": n, "pad": "y" * draw.randint(0, 9000)}, draw.randbytes(draw.randint(0, 99_000)))
        for n in range(20)
    ]
    for message, content in sent:
        one.send(message, content)
    ends.turn(4000)
    assert [(message, content) for _, message, content in ends.heard] == sent
    one.send({"kind": "last"})
    one.close()
    ends.turn()
    assert ends.heard[-1][1] == {"kind": "last"}
    assert ends.ended == [("b", "it has ended")]


def greet(ends, token="t"):
    met = []
    greeting = Greeting(ends.loop, ends.a, "t", lambda number, line: met.append(("leader", number, line)))
    known, failed = (lambda line: met.append(("keeper", 3, line))), (lambda why: met.append(("failed", why)))
    Arrival(ends.loop, ends.b, token, 3, known, failed)
    ends.turn()
    return met, greeting


def frames(end):
    """What lies on a socket: messages, and the bytes that they came in."""
    raw, found = end.recv(1 << 16), []
    at = 0
    while at < len(raw):
        size, beside = struct.unpack_from("!II", raw, at)
        found.append(json.loads(raw[at + 8 : at + 8 + size]))
        at += 8 + size + beside
    return found, raw


def test_who_has_the_token_is_known_by_its_number_and_the_token_is_not_sent(ends):
    token, met = "0123456789abcdef", []
    Greeting(ends.loop, ends.a, token, lambda number, line: met.append(number))
    (nonce,), first = frames(ends.b)
    nonces = nonce["nonce"], "mine"
    said = frame({"kind": "greet", "host": 3, "nonce": "mine", "proof": proof(token, "keeper", 3, nonces)})
    ends.b.sendall(said)
    ends.turn()
    (welcome, *_), last = frames(ends.b)
    assert welcome == {"kind": "welcome", "proof": proof(token, "leader", 3, nonces)}
    assert met == [3]
    assert token.encode() not in first + said + last
    ends.loop.unwatch(ends.a.fileno())


def test_both_sides_of_ours_come_to_know_each_other(ends):
    met, _ = greet(ends)
    assert sorted(one[:2] for one in met) == [("keeper", 3), ("leader", 3)]


@pytest.mark.parametrize("token", ["", "T", "t "])
def test_who_has_another_token_is_dropped_and_says_so_on_its_side(ends, token):
    met, greeting = greet(ends, token)
    assert [what for what, *_ in met] == ["failed"]
    assert not greeting.line.open


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n", b"\0" * 64, frame(b"[1]"), frame(b"nonsense"), frame({"kind": "greet"}),
        frame({"kind": "greet", "host": "x", "nonce": "n", "proof": "p"}), frame({"kind": "said", "rank": 0}),
        frame({"kind": "greet", "host": 1, "nonce": "n", "proof": proof("t", "keeper", 1, ("guess", "n"))}),
        frame({"kind": "x"}, size=1 << 20), frame({"kind": "x"}, b"bytes"), frame({"kind": "x", "pad": "y" * 5000}),
        frame(b"[" * 4000), frame({"kind": "greet", "host": float("inf"), "nonce": "n", "proof": "p"}),
    ],
)  # fmt: skip
def test_whoever_proves_nothing_gets_nowhere_whatever_it_says(ends, said):
    met = []
    greeting = Greeting(ends.loop, ends.a, "t", lambda *known: met.append(known))
    ends.b.sendall(said)
    ends.turn()
    assert (met, greeting.line.open, greeting.done) == ([], False, False)


def test_a_proof_that_was_heard_serves_nobody_again(ends):
    """Each greeting has a nonce of its own."""
    nonce = "n" * 32
    said = frame({"kind": "greet", "host": 1, "nonce": nonce, "proof": proof("t", "keeper", 1, ("another", nonce))})
    met = []
    greeting = Greeting(ends.loop, ends.a, "t", lambda *known: met.append(known))
    ends.b.sendall(said)
    ends.turn()
    assert (met, greeting.line.open) == ([], False)


def test_a_leader_that_cannot_prove_itself_is_told_nothing(ends):
    failed = []
    Arrival(ends.loop, ends.b, "t", 1, lambda line: failed.append("known"), failed.append)
    ends.a.sendall(frame({"kind": "nonce", "nonce": "n"}) + frame({"kind": "welcome", "proof": "p"}))
    ends.turn()
    assert failed == ["who listens there is not the keeper of this world"]


def test_who_says_nothing_at_all_is_given_up(ends):
    met, failed = [], []
    greeting = Greeting(ends.loop, ends.a, "t", lambda *known: met.append(known))
    ends.turn()
    ends.pass_time(host_line.GREET_S + BEAT_S)
    assert (met, greeting.line.open) == ([], False)
    one, other = socket.socketpair()
    Arrival(ends.loop, other, "t", 1, lambda line: failed.append("known"), failed.append)
    ends.pass_time(host_line.GREET_S + BEAT_S)
    assert failed == ["who listens there says nothing"]
    one.close()
    other.close()


def test_both_live_as_long_as_they_are_heard_and_silence_is_a_loss(ends):
    met, _ = greet(ends)
    lines = {who: line for who, _, line in met}
    for name, line in lines.items():
        line.on_end = lambda why, name=name: ends.ended.append((name, why))
    ends.pass_time(3 * LOST_S)
    assert ends.ended == []
    ends.loop.unwatch(ends.b.fileno())  # it is not heard any more, and does not end
    lines["keeper"].open = False
    ends.pass_time(LOST_S + 2 * BEAT_S)
    assert ends.ended == [("leader", f"it has said nothing for {LOST_S:.0f} s")]


def test_one_that_takes_nothing_is_lost_and_nothing_is_dropped_in_silence(ends, monkeypatch):
    monkeypatch.setattr(host_line, "MOST_UNSENT", 1 << 20)
    line = ends.line(ends.a, "a")
    for _ in range(100):
        line.send({"kind": "x"}, bytes(100_000))
    assert ends.ended == [("a", "it takes nothing of what it is sent")]
    assert not line.open
