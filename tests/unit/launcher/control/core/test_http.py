"""What comes over the port is a request, a refusal in words, or not whole yet; nothing raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.launcher.control.core.http import MOST_BODY, MOST_HEAD, Request, Response, answer, parse, refusal

WHOLE = b"POST /v1/kill?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\n" + b'{"rank": 3}'


def test_a_request_is_whole_at_its_last_byte_and_not_before():
    for size in range(len(WHOLE)):
        assert parse(WHOLE[:size]) is None
    found = parse(WHOLE + b"what follows")
    assert found == Request("POST", "/v1/kill", {"host": "a", "content-length": "11"}, b'{"rank": 3}')
    assert found.json() == {"rank": 3}


@pytest.mark.parametrize("body", [b"[1]", b"3", b"{", b"\xff", b"[" * 60_000])
def test_a_body_that_is_no_object_is_a_value_error(body):
    with pytest.raises(ValueError):
        Request("POST", "/", {}, body).json()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01", 400),  # TLS
        (b"\x00\x00", 400),  # a TCPStore's client
        (b'{"kind":"join"}\n', 400),  # an agent of another job
        (b"GET /\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / SPDY/3\r\n\r\n", 400),
        (b"G" * (MOST_HEAD + 1), 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MOST_BODY + 1), 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    ],
)
def test_nonsense_is_refused_as_soon_as_it_can_be_told(data, status):
    found = parse(data)
    assert isinstance(found, Response)
    assert found.status == status
    assert json.loads(found.body)["error"]


@given(st.binary(max_size=300))
def test_whatever_comes_nothing_raises(data):
    parse(data)
    parse(b"GET " + data)
    parse(b"GET / HTTP/1.1\r\n" + data + b"\r\n\r\n")


def test_an_answer_says_its_length_and_that_the_connection_ends():
    head, _, body = answer({"a": 1}).encode().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: %d\r\n" % len(body) in head
    assert b"Connection: close" in head
    assert json.loads(body) == {"a": 1}
    assert refusal(404, "no").encode().startswith(b"HTTP/1.1 404 Not Found\r\n")
