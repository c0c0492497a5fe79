"""An agent on its way to the others: whoever listens there instead, and whoever does not, it ends with words."""

import json
import socket
import threading

import pytest

from everstep.clock import SYSTEM
from everstep.errors import ConfigurationError
from everstep.launcher.nodes import joining
from everstep.launcher.nodes.core.endpoint import Endpoint
from everstep.launcher.nodes.joining import JobOver, Meeting
from everstep.process.loop import Loop


def join(port, host="127.0.0.1", hosts=False, **limits):
    loop = Loop(SYSTEM)
    try:
        endpoint = Endpoint(host, port, hosts, 1, **({"connect_s": 0.5, "join_s": 1.0} | limits))
        return Meeting(loop, endpoint, lambda: None, lambda pid: None).join({"nnodes": 2}, {}, None)
    finally:
        loop.close()


class Server:
    """Accepts one connection and does with it what the test wants."""

    def __init__(self, act):
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, args=(act,))
        self.thread.start()

    def _serve(self, act):
        line, _ = self.door.accept()
        with line:
            act(line)
            while line.recv(65536):
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.thread.join()
        self.door.close()


def says(*messages):
    def act(line):
        line.recv(65536)
        for message in messages:
            line.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    return act


def hangs_up(line):
    line.recv(65536)
    line.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (hangs_up, "hung up without a word of ours"),
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "hung up without a word of ours"),
        (says({"kind": "hello"}), "answered with words that are not ours"),
        (says({"kind": "refused", "text": "--nnodes 2 here"}), "refuses this node: --nnodes 2 here"),
        (says({"kind": "waiting", "lacking": "nodes 1 of 2"}), "nodes 1 of 2 have not come to"),
    ],
)
def test_whoever_listens_there_instead_is_named_with_what_to_look_at(act, said):
    with Server(act) as server, pytest.raises(ConfigurationError, match=said) as refused:
        join(server.port)
    assert f"127.0.0.1:{server.port}" in str(refused.value)


def test_who_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(joining, "ANSWER_S", 0.5)
    with Server(lambda line: None) as server, pytest.raises(ConfigurationError, match=r"said nothing for 0.5 s"):
        join(server.port, join_s=60.0)


def test_nobody_there_and_a_name_that_does_not_resolve(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(ConfigurationError, match=f"nobody was reached at the end point 127.0.0.1:{port} within 0.5 s"):
        join(port)

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(ConfigurationError, match="the name 'no-such' does not resolve"):
        join(port, "no-such")


def test_a_port_that_is_another_s_is_an_error_of_the_node_that_opens_it():
    with socket.create_server(("127.0.0.1", 0)) as door, pytest.raises(ConfigurationError, match="cannot be opened"):
        join(door.getsockname()[1], hosts=True)


def test_a_hub_that_outlives_the_agent_which_opened_the_port_is_met_there_by_its_successor():
    """Node rank 0 is started again: the port is its own job's."""
    nodes = {"node-1": "10.0.0.2", "node-0": "10.0.0.1"}
    let_in = {"kind": "complete", "you": "node-0", "nodes": nodes, "at_work": ["node-1"], "ordinal": 2, "late": True}
    with Server(says({"kind": "waiting", "lacking": "a place"}, let_in)) as server:
        joined = join(server.port, hosts=True)
        joined.stream.line.shutdown(socket.SHUT_RDWR)
        joined.stream.line.close()
    assert (joined.name, joined.ordinal, joined.late, list(joined.present)) == ("node-0", 2, True, list(nodes))


def test_who_comes_when_the_job_has_ended_has_nothing_to_do():
    words = says({"kind": "waiting", "lacking": "a place"}, {"kind": "over"})
    with Server(words) as server, pytest.raises(JobOver, match="has ended without this node") as over:
        join(server.port)
    assert over.value.exit_code == 0


def test_all_are_here_and_what_follows_is_kept_for_whoever_takes_over():
    nodes = {"node-0": "10.0.0.1", "node-1": "10.0.0.2"}
    messages = [
        {"kind": "waiting", "lacking": "1 of 2 nodes"},
        {"kind": "complete", "you": "node-1", "nodes": nodes, "at_work": ["node-0"], "ordinal": 1, "late": False},
        {"kind": "fact", "fact": {"is": "kept"}},
    ]
    with Server(says(*messages)) as server:
        joined = join(server.port)
        assert (joined.name, joined.present) == ("node-1", nodes)
        joined.stream.line.shutdown(socket.SHUT_RDWR)
        joined.stream.line.close()
