"""What an operator wants changed: nothing is guessed."""

import pytest

from everstep.launcher.control.core.http import Request, Response
from everstep.launcher.control.core.wishes import Kill, wish_of


def wished(body):
    return wish_of(Request("POST", "/v1/kill", {}, body))


def test_a_rank_or_the_job():
    assert wished(b'{"rank": 0}') == Kill(0)
    assert wished(b'{"rank": 12}') == Kill(12)
    assert wished(b'{"job": true}') == Kill(None)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"{", b'{"rank": null}', b'{"rank": "1"}', b'{"rank": true}', b'{"rank": -1}',
        b'{"rank": 1.5}',
        b'{"job": false}', b'{"job": 1}', b'{"rank": 1, "job": true}', b'{"rank": 1, "signal": 9}', b'{"ranks": [1]}',
    ],
)  # fmt: skip
def test_anything_else_ends_nothing(body):
    found = wished(body)
    assert isinstance(found, Response)
    assert found.status == 400
