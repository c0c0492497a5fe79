"""Which exceptions say no more than that a peer is gone."""

import pytest

from everstep.recovery.victims import is_victim

LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


def raised(wrap):
    try:
        try:
            raise LOST
        except RuntimeError as error:
            wrap(error)
    except Exception as outer:  # noqa: BLE001 - whatever was made of it
        return outer


def of_a_users_own(error):
    raise ValueError("training failed") from error


def over(error):
    raise KeyError("in a handler")


def hidden(error):
    raise ValueError("on purpose") from None


class Mute(RuntimeError):
    def __str__(self):
        raise TypeError


@pytest.mark.parametrize(
    ("error", "victim"),
    [
        (LOST, True),
        (raised(of_a_users_own), True),
        (raised(over), True),
        (raised(hidden), False),
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("the batch is bad"), False),
        (Mute(), False),
        (None, False),
    ],
)
def test_a_lost_peer_is_told_from_a_fault_of_ones_own(error, victim):
    assert is_victim(error) is victim


def test_a_chain_that_bites_its_tail_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert not is_victim(one)
