"""When the memory of a device is free for the next attempt, and who is named where it is not."""

import pytest

from everstep.launcher.core.reclaim import MIB, STILL_S, Look, Reclaim

GIB = 1 << 30


def story(*looks, every_s=0.5, limit_s=50.0):
    """What is said, and at which look."""
    judge = Reclaim(0, limit_s, 512 * MIB)
    for at, look in enumerate(looks):
        said = judge.judge(look, 100.0 + at * every_s)
        if said is not None:
            return at, said
    return None


@pytest.mark.parametrize("used", [0, 512 * MIB])
def test_what_is_free_is_not_waited_for(used):
    assert story(Look(used)) == (0, "")


def test_what_falls_is_waited_for():
    assert story(Look(100 * GIB), Look(60 * GIB), Look(20 * GIB), Look(0)) == (3, "")


def test_a_rank_that_shares_the_device_may_have_it():
    assert story(Look(20 * GIB, 20 * GIB, sharing=True)) == (0, "")


def test_what_a_stranger_holds_is_named_at_once_and_not_waited_for():
    at, said = story(Look(20 * GIB, 20 * GIB, strangers=("pid 7 (python)",)))
    assert at == 0
    assert said.startswith("GPU 0 still has 20480 MiB taken by pid 7 (python), 0.0 s after")


def test_beside_a_stranger_what_is_being_freed_is_waited_for():
    stranger = {"held": 20 * GIB, "strangers": ("pid 7 (python)",)}
    at, said = story(Look(60 * GIB, **stranger), Look(30 * GIB, **stranger), Look(20 * GIB, **stranger))
    assert (at, "taken by pid 7 (python), 1.0 s after" in said) == (2, True)


def test_what_stands_still_and_is_nobody_s_is_named_soon():
    at, said = story(*[Look(20 * GIB)] * 10)
    assert at * 0.5 == STILL_S
    assert "by nobody that the driver names, 1.0 s after" in said


def test_what_falls_for_ever_is_waited_for_no_longer_than_the_limit():
    at, said = story(*[Look(100 * GIB - n * MIB) for n in range(200)], limit_s=5.0)
    assert at * 0.5 == 5.0
    assert "5.0 s after the last attempt ended; the next begins all the same" in said
