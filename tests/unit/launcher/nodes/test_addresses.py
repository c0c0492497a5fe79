"""By which address others reach this machine."""

import socket

import pytest

from everstep.launcher.nodes import addresses


@pytest.mark.parametrize(
    ("own", "host"),
    [
        ("10.0.0.7", "node0"), ("10.0.0.7", "10.0.0.7"), ("127.0.0.1", "localhost"), ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1"), ("::1", "ip6-localhost"), ("127.0.0.1", "localhost.localdomain"),
    ],
)  # fmt: skip
def test_what_others_reach_and_what_is_meant_for_one_machine_stays(own, host):
    assert addresses.outward(own, host) == own


def test_a_name_that_is_127_0_1_1_at_home_is_not_what_others_are_told(monkeypatch):
    monkeypatch.setattr(addresses, "_of_default_route", lambda: "10.0.0.7")
    assert addresses.outward("127.0.1.1", "node0") == "10.0.0.7"


def test_without_a_way_out_an_interface_s_address_serves(monkeypatch):
    monkeypatch.setattr(addresses, "_of_default_route", lambda: "")
    monkeypatch.setattr(addresses, "_of_an_interface", lambda: "10.77.1.10")
    assert addresses.outward("127.0.1.1", "node0") == "10.77.1.10"
    monkeypatch.setattr(addresses, "_of_an_interface", lambda: "")
    assert addresses.outward("127.0.1.1", "node0") == "127.0.1.1"


def test_the_kernel_names_addresses_that_are_this_machine_s():
    for found in filter(None, (addresses._of_default_route(), addresses._of_an_interface())):
        assert not addresses.is_loopback(found)
        with socket.socket() as probe:
            probe.bind((found, 0))
