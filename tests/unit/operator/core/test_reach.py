"""Whom a command asks."""

import pytest

from everstep.errors import UsageError
from everstep.operator.core.reach import NobodyThere, Reach, choices, endpoint
from everstep.recovery.control_file import ControlFile


def told(address, host, port=1):
    return ControlFile(address, port, "t", host, "node-0", 7, "job")


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ("node7:4000", Reach("node7", 4000, "t")),
        ("127.0.0.1:1", Reach("127.0.0.1", 1, "t")),
        ("[::1]:80", Reach("::1", 80, "t")),
        ("runs/a:b", None),
        ("./x:80", None),
        ("everstep-runs/20261201", None),
        ("a:70000", None),
        ("::1", None),
    ],
)
def test_host_and_port_are_told_from_a_path(text, reach):
    assert endpoint(text, "t") == reach


def test_an_end_point_without_a_token_is_refused_with_where_it_lies():
    with pytest.raises(UsageError, match=r"EVERSTEP_TOKEN.*control.json"):
        endpoint("node7:4000", None)


@pytest.mark.parametrize(
    ("found", "reaches"),
    [
        ([told("127.0.0.1", "here")], [("127.0.0.1", 1)]),
        ([told("0.0.0.0", "here")], [("127.0.0.1", 1)]),
        ([told("10.0.0.1", "here")], [("10.0.0.1", 1)]),
        ([told("127.0.0.1", "there"), told("127.0.0.1", "here", 2)], [("127.0.0.1", 2)]),
        ([told("127.0.0.1", "there"), told("10.0.0.2", "far", 2)], [("10.0.0.2", 2)]),
        ([told("127.0.0.1", "there"), told("0.0.0.0", "far", 2)], [("far", 2)]),
        (
            [told("10.0.0.2", "far"), told("::", "here", 2), told("127.0.0.1", "here", 3)],
            [("::1", 2), ("127.0.0.1", 3), ("10.0.0.2", 1)],
        ),
    ],
)
def test_an_agent_here_is_asked_first_and_loopback_elsewhere_never(found, reaches):
    assert choices(found, "here") == [Reach(*reach, "t") for reach in reaches]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_where_all_listen_on_loopback_elsewhere_the_words_say_what_to_do(address):
    with pytest.raises(NobodyThere, match=r"on there, and this is here.*--control-endpoint"):
        choices([told(address, "there")], "here")
