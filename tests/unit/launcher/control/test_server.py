"""The end point under whoever reaches its port: silent, garbling, greedy, deaf, many. The loop's thread is ours."""

import errno
import json
import socket

import pytest

from everstep.clock import SYSTEM
from everstep.errors import ConfigurationError
from everstep.launcher.control import server as serving
from everstep.launcher.control.core.http import Response, answer
from everstep.launcher.control.server import MOST_CONNECTIONS, Server
from everstep.process.loop import Loop

MOST_TURNS = 20_000


class Desk:
    """A server whose loop is turned by the test."""

    def __init__(self, serve=None):
        self.loop, self.troubles, self.asked = Loop(SYSTEM), [], []
        self.server = Server(self.loop, "127.0.0.1", 0, serve or self._serve, self.troubles.append)
        self.lines = []

    def _serve(self, request, reply):
        self.asked.append(request.path)
        reply(answer({"path": request.path}))

    def line(self, data=b""):
        """A client; what it has to say is said when its connection stands."""
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(self.server.address)
        self.lines.append(line)
        if data:
            self.turn_until(lambda: self._sent(line, data))
        return line

    def _sent(self, line, data):
        try:
            line.send(data)
        except BlockingIOError:  # it waits to be accepted
            return False
        return True

    def turn_until(self, happened):
        for _ in range(MOST_TURNS):
            self.loop.later(0.001, lambda: None)
            self.loop.turn()
            assert len(self.server._lines) <= MOST_CONNECTIONS
            if happened():
                return
        raise AssertionError("it did not happen")

    def read(self, line):
        """What is answered, to the end of the connection."""
        got = bytearray()

        def ended():
            try:
                while piece := line.recv(1 << 20):
                    got.extend(piece)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            return True

        self.turn_until(ended)
        head, _, body = bytes(got).partition(b"\r\n\r\n")
        return (int(head.split()[1]), json.loads(body)) if head else None

    def close(self):
        self.server.close()
        for line in self.lines:
            line.close()
        self.loop.close()


@pytest.fixture
def desk():
    found = Desk()
    yield found
    found.close()


GET = b"GET /v1/ps HTTP/1.1\r\n\r\n"


def test_a_request_is_answered_and_the_connection_ends(desk):
    assert desk.read(desk.line(GET)) == (200, {"path": "/v1/ps"})
    assert desk.server._lines == {}


def test_a_request_may_come_in_pieces_and_from_one_who_says_nothing_more(desk):
    line = desk.line(GET[:5])
    desk.turn_until(lambda: any(each.read for each in desk.server._lines))
    line.send(GET[5:])
    line.shutdown(socket.SHUT_WR)
    assert desk.read(line) == (200, {"path": "/v1/ps"})


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02", b"\0" * 64, b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x" * 9000]
)
def test_garbage_is_answered_with_words_and_asks_nothing(desk, data):
    status, told = desk.read(desk.line(data))
    assert status in (400, 431)
    assert told["error"]
    assert desk.asked == []


def test_who_says_nothing_is_let_go(desk, monkeypatch):
    monkeypatch.setattr(serving, "READ_S", 0.0)
    assert desk.read(desk.line()) is None


def test_a_thousand_silent_connections_neither_stay_nor_keep_an_operator_out(desk):
    """And they come some at a time: the loop has its turns between."""
    for _ in range(10):
        for _ in range(100):
            desk.line()
        desk.turn_until(lambda: len(desk.server._lines) == MOST_CONNECTIONS)
        began = desk.loop.clock.now()
        desk.turn_until(lambda began=began: desk.loop.clock.now() > began + serving.PAUSE_S)
    assert len(desk.lines) == 1000
    assert desk.read(desk.line(GET)) == (200, {"path": "/v1/ps"})
    assert desk.troubles == []


def test_a_flood_is_accepted_some_at_a_time(desk):
    for _ in range(60):
        desk.line()
    accepted = []
    for _ in range(100):
        desk.loop.later(0.0, lambda: None)
        desk.loop.turn()
        accepted.append(len(desk.server._lines))
        if accepted[-1] >= serving.BATCH:
            break
    desk.loop.later(0.0, lambda: None)
    desk.loop.turn()
    assert len(desk.server._lines) == serving.BATCH, "the rest waits in the kernel for a moment"
    desk.turn_until(lambda: len(desk.server._lines) == 60)


def test_a_client_that_never_reads_holds_nothing_up_and_is_let_go():
    large = Response(200, b'"' + b"x" * 32_000_000 + b'"')
    desk = Desk(lambda request, reply: reply(large if request.path == "/large" else answer({})))
    try:
        deaf = desk.line(b"GET /large HTTP/1.1\r\n\r\n")
        desk.turn_until(lambda: any(each.unsent for each in desk.server._lines))
        assert desk.read(desk.line(GET)) == (200, {})
        (left,) = desk.server._lines
        assert left.timer.when <= desk.loop.clock.now() + serving.WRITE_S
        left.timer.call()  # its time is over
        assert desk.server._lines == {}
        deaf.close()
    finally:
        desk.close()


def test_an_answer_may_come_later_once_and_to_nobody():
    late = []
    desk = Desk(lambda request, reply: late.append(reply))
    try:
        line, gone = desk.line(GET), desk.line(GET)
        desk.turn_until(lambda: len(late) == 2)
        desk.server._end(list(desk.server._lines)[1])
        for reply in late:
            reply(answer({"late": True}))
            reply(answer({"twice": True}))
        assert desk.read(line) == (200, {"late": True})
        assert desk.read(gone) is None
    finally:
        desk.close()


def test_an_answer_that_is_on_its_way_is_not_mixed_with_another():
    late, large = [], answer({"text": "x" * 8_000_000})
    desk = Desk(lambda request, reply: late.append(reply))
    try:
        line = desk.line(GET)
        desk.turn_until(lambda: late)
        late[0](large)
        assert next(iter(desk.server._lines)).unsent, "it does not fit at once"
        late[0](answer({"twice": True}))
        assert desk.read(line) == (200, json.loads(large.body))
    finally:
        desk.close()


def test_a_question_that_fails_is_answered_told_once_and_ends_nothing():
    def fail(request, reply):
        raise LookupError("a bug")

    desk = Desk(fail)
    try:
        for _ in range(3):
            status, told = desk.read(desk.line(GET))
            assert status == 500
            assert "a bug" in told["error"]
        assert len(desk.troubles) == 1
    finally:
        desk.close()


def test_without_a_free_descriptor_the_loop_does_not_turn_round_the_door(desk, monkeypatch):
    class Full:
        def __init__(self, door):
            self.door, self.tries = door, 0

        def accept(self):
            self.tries += 1
            raise OSError(errno.EMFILE, "too many open files")

        def __getattr__(self, name):
            return getattr(self.door, name)

    monkeypatch.setattr(serving, "NO_ROOM_S", 0.02)
    door = desk.server._door
    full = desk.server._door = Full(door)
    line = desk.line(GET)
    desk.turn_until(lambda: full.tries == 2)
    began = SYSTEM.now()
    desk.turn_until(lambda: full.tries == 4)
    assert SYSTEM.now() - began >= 0.02, "one try in so long"
    desk.server._door = door
    assert desk.read(line) == (200, {"path": "/v1/ps"})


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 300, "ä" * 100, "203.0.113.77", "a\0b"])
def test_an_address_that_is_not_ours_is_told_with_the_flag(host):
    loop = Loop(SYSTEM)
    try:
        with pytest.raises(ConfigurationError, match="--control-endpoint"):
            Server(loop, host, 0, lambda request, reply: None, lambda text: None)
    finally:
        loop.close()


def test_a_port_that_is_another_s_is_told_with_the_flag():
    loop = Loop(SYSTEM)
    try:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigurationError, match=rf"127.0.0.1:{port}.*--control-endpoint"):
                Server(loop, "127.0.0.1", port, lambda request, reply: None, lambda text: None)
    finally:
        loop.close()
