"""A buffer that two tiers read stays as it is until both have let it go."""

import pytest

from everstep.checkpoint.shares import shares


class Shelf:
    """What is told to the shelf, in order."""

    plan = None

    def __init__(self):
        self.told = []

    def fd(self, rank, buffer):
        return 100 * rank + buffer

    def hold(self, rank, buffer, offer=0):
        self.told.append(("hold", rank, buffer))

    def release(self, rank, buffer, offer=0):
        self.told.append(("give up" if offer else "release", rank, buffer))

    def sealed(self):
        return []


@pytest.fixture
def shelf():
    return Shelf()


def released(shelf):
    return [(rank, buffer) for what, rank, buffer in shelf.told if what == "release"]


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_of_two_tiers_to_be_done_frees_nothing(shelf, first):
    tiers = shares(shelf, 2)
    for tier in tiers:
        tier.hold(1, 3)
    tiers[first].release(1, 3)
    assert released(shelf) == []
    tiers[1 - first].release(1, 3)
    assert released(shelf) == [(1, 3)]


def test_a_tier_that_never_held_it_frees_what_nobody_holds_and_nothing_else(shelf):
    one, other = shares(shelf, 2)
    other.release(0, 2, 7)  # kept by its worker on a chance, and not wanted
    assert shelf.told == [("give up", 0, 2)]
    one.hold(0, 2)
    other.release(0, 2)
    other.release(0, 2)
    assert released(shelf) == []
    one.release(0, 2)
    assert released(shelf) == [(0, 2)]


def test_ranks_and_buffers_are_told_apart(shelf):
    one, other = shares(shelf, 2)
    one.hold(0, 1)
    other.hold(1, 1)
    other.hold(0, 2)
    one.release(0, 1)
    assert released(shelf) == [(0, 1)]
    assert one.fd(1, 1) == 101
    assert (one.plan, list(one.sealed())) == (None, [])
