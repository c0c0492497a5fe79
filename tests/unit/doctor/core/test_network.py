"""What names and the port come to."""

import pytest

from everstep.doctor.core.network import Network, judge

GOOD = {
    "addresses": ["10.0.0.5"],
    "ours": False,
    "port": "refused",
    "name": "node-1",
    "name_addresses": ["10.0.0.6", "fe80::1%eth0"],
}


def levels(changes, trouble=""):
    return {one.what: one.level.value for one in judge(Network.from_facts("node-0:29500", GOOD | changes, trouble))}


OK = {"end point": "ok", "end point's port": "ok", "own name": "ok"}


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, {}),
        ({"port": "open"}, {}),
        ({"port": "timed out"}, {"end point's port": "problem"}),
        ({"port": "No route to host"}, {"end point's port": "problem"}),
        ({"ours": True, "port": "free"}, {}),
        ({"ours": True, "port": "Address already in use"}, {"end point's port": "warning"}),
        ({"addresses": ["127.0.0.1", "::1"], "ours": True, "port": "free"}, {"end point": "warning"}),
        ({"name_addresses": ["127.0.1.1"]}, {"own name": "warning"}),
        ({"name_addresses": [], "name_unresolved": "does not resolve (unknown)"}, {"own name": "warning"}),
        ({"name_addresses": ["127.0.1.1", "10.0.0.6"]}, {}),
    ],
)
def test_each_fact_has_its_level(changes, differs):
    assert levels(changes) == OK | differs


def test_a_name_that_does_not_resolve_has_no_port():
    assert levels({"unresolved": "does not resolve (Name or service not known)", "addresses": []}) == {
        "end point": "problem",
        "own name": "ok",
    }


def test_a_name_service_that_hangs_is_a_problem():
    assert levels({}, "no answer within 15 s, in: resolving node-0") == {"end point": "problem"}
