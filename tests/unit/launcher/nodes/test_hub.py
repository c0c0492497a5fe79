"""The hub, with connections and a clock of ours."""

import errno
import itertools
import socket

import pytest

from everstep.launcher.config import LaunchConfig
from everstep.launcher.nodes.core.lease import BEAT_S, GIVEN_AWAY_S, SUSPECTED_S
from everstep.launcher.nodes.hub import STRANGER_S, Hub
from everstep.recovery.link import Link

LIMITS = {"soft_s": None, "hard_s": None, "first_s": None, "automatic": False}


class Loop:
    """Whose time goes on when it is told to."""

    def __init__(self):
        self.clock, self.time = self, 100.0

    def now(self):
        return self.time

    def watch(self, *_, **__):
        """Nothing comes by a descriptor here."""

    unwatch = later = stop = watch


class Line:
    """One agent's connection; `breaks` is called when it is written to."""

    def __init__(self):
        self.heard, self.breaks = [], None

    def send(self, message):
        self.heard.append(message)
        if self.breaks:
            breaks, self.breaks = self.breaks, None
            breaks()

    def close(self):
        """Nothing is held."""


@pytest.fixture
def hub():
    """A hub with three agents that have come."""
    terms = LaunchConfig(script=__file__, nnodes=3, nproc=1).terms("1")
    ours, theirs = Link.pair()
    with socket.create_server(("127.0.0.1", 0)) as door:
        found = Hub(Loop(), {"terms": terms, "limits": LIMITS, "last_call_s": 1.0}, door, theirs)
        for number in range(3):
            found._streams[number] = Line()
            found._take(
                number,
                {"kind": "join", "terms": terms, "node_rank": number, "address": "127.0.0.1", "who": str(number)},
            )
        yield found
    ours.close()
    theirs.close()


def said(hub, number, kind):
    return [m for m in hub._streams[number].heard if m["kind"] == kind]


def test_telling_of_a_silent_node_may_find_that_others_are_gone(hub):
    """All were looked at before the first was told of; the connections of two break under the telling."""
    assert said(hub, 0, "complete")
    loop = hub._loop
    hub._look()
    for _ in range(int(SUSPECTED_S / BEAT_S) + 2):
        loop.time += BEAT_S
        hub._silence.heard(0, loop.time)
        hub._streams[0].breaks = lambda: (hub._ended(1), hub._ended(2))
        hub._look()
    assert [m["fact"]["node"] for m in said(hub, 0, "fact")] == ["node-1", "node-2"]
    assert len(said(hub, 0, "notice")) == 1
    for _ in range(int(GIVEN_AWAY_S / BEAT_S) + 2):
        loop.time += BEAT_S
        hub._silence.heard(0, loop.time)
        hub._look()
    assert len(said(hub, 0, "fact")) == 2


def nested(depth=5000):
    found = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "said_",
    [
        {},
        {"kind": "join"},
        {"kind": "join", "terms": 3},
        {"kind": "join", "terms": {"version": nested()}, "node_rank": 0, "address": "", "who": ""},
        {"kind": "join", "terms": {}, "node_rank": nested(), "address": "", "who": ""},
    ],
)
def test_what_a_stranger_says_is_refused_or_ends_its_connection_and_concerns_nobody_else(hub, said_):
    hub._streams[9] = Line()
    hub._heard(9, said_)
    assert sorted(hub._streams) == [0, 1, 2]
    assert not said(hub, 0, "fact")


def test_who_does_not_say_who_it_is_is_let_go(hub):
    ends = [socket.create_connection(hub._door.getsockname()) for _ in range(3)]
    hub._numbers = itertools.count(3)
    for _ in ends:
        hub._accept()
    hub._accept()  # nobody waits there: nor does the hub
    hub._heard(4, {"kind": "join", "terms": hub._register.terms, "node_rank": None, "address": "", "who": ""})
    hub._loop.time += STRANGER_S + 1.0
    for number in range(3):
        hub._silence.heard(number, hub._loop.time)
    hub._let_strangers_go(hub._loop.time)
    assert sorted(hub._streams) == [0, 1, 2, 4], "who waits in line stays"
    for line in [*ends, hub._streams[4]]:
        line.close()


def test_without_a_free_descriptor_the_door_is_left_alone_for_a_while(hub, monkeypatch):
    class Door:
        def accept(self):
            raise OSError(errno.EMFILE, "too many open files")

        def fileno(self):
            return 7

    calls = []
    monkeypatch.setattr(hub, "_door", Door())
    for name in ("watch", "unwatch", "later"):
        monkeypatch.setattr(hub._loop, name, lambda *words, name=name: calls.append((name, words)))
    hub._accept()
    assert [(name, words[0]) for name, words in calls] == [("unwatch", 7), ("later", 0.5)]
    calls[1][1][1]()
    assert calls[2][:1] == ("watch",)
