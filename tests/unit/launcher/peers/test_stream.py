"""A connection to a hub, over real sockets: whatever comes by it, its own end is the worst."""

import socket

import pytest

from everstep.clock import SYSTEM
from everstep.launcher.peers.stream import Stream
from everstep.process.loop import Loop


@pytest.mark.parametrize(
    "said",
    [
        b"\0" * 9, b"GET / HTTP/1.1\r\n\r\n", b"3\n", b"[]\n", b"\xff\n", b'{"a":\n', b"[" * 5000 + b"\n",
        b'{"a":' * 5000 + b"\n", b"9" * 5000 + b"\n",
    ],
)  # fmt: skip
def test_what_is_no_word_of_ours_ends_the_connection(said):
    loop, heard = Loop(SYSTEM), []
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as end:
        line, _ = door.accept()
        Stream(loop, line, heard.append, loop.stop)
        end.sendall(b'{"kind":"join"}\n' + said)
        loop.later(30.0, lambda: pytest.fail("it goes on"))
        loop.run()
        assert heard == [{"kind": "join"}]
    loop.close()
