"""What an operator is told where the question is not answered as it should be."""

import socket
import threading

import pytest

from everstep.errors import EverstepError, UsageError
from everstep.operator import asking
from everstep.operator.asking import ask
from everstep.operator.core.reach import NobodyThere, Reach


@pytest.fixture
def answering():
    """Somebody who listens, reads a request and says what it is given; None: nothing, for ever."""
    threads, doors, lines = [], [], []

    def begin(said):
        door = socket.create_server(("127.0.0.1", 0))
        doors.append(door)

        def serve():
            line, _ = door.accept()
            lines.append(line)
            line.recv(65536)
            if said is not None:
                line.sendall(said)
                line.close()

        thread = threading.Thread(target=serve)
        thread.start()
        threads.append(thread)
        return Reach("127.0.0.1", door.getsockname()[1], "t")

    yield begin
    for thread in threads:
        thread.join(10.0)
    for each in (*doors, *lines):
        each.close()


def said(status, body):
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (401, '{"error": "no token"}', UsageError, "no token"),
        (409, '{"error": "no such rank"}', EverstepError, "no such rank"),
        (500, "{}", EverstepError, "status 500"),
        (200, "<html>", NobodyThere, "no agent of Everstep"),
        (200, "[]", NobodyThere, "no agent of Everstep"),
    ],
)
def test_what_is_refused_and_what_is_not_ours_is_told_in_words(answering, status, body, error, words):
    with pytest.raises(error, match=words):
        ask(answering(said(status, body)), "/v1/ps")


def test_an_answer_is_an_object(answering):
    assert ask(answering(said(200, '{"a": 1}')), "/v1/ps", {"b": 2}) == {"a": 1}


def test_another_protocol_is_told(answering):
    with pytest.raises(NobodyThere, match="cannot be asked"):
        ask(answering(b"SSH-2.0-x\r\n"), "/v1/ps")


def test_who_does_not_answer_is_not_waited_for(answering, monkeypatch):
    monkeypatch.setattr(asking, "LONG_S", 0.05)
    with pytest.raises(NobodyThere, match="does not answer"):
        ask(answering(None), "/v1/stacks", long=True)


def test_nobody_listens_and_a_name_that_does_not_resolve():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(NobodyThere, match="nobody listens"):
        ask(Reach("127.0.0.1", port, "t"), "/v1/ps")
    with pytest.raises(NobodyThere, match="does not resolve"):
        ask(Reach("no-such-host.invalid", 1, "t"), "/v1/ps")
