"""Resources are ended together, within a deadline, whatever one of them does."""

import threading

import pytest

from everstep.clock import SYSTEM
from everstep.resources import Registry, together


def test_all_are_ended_with_the_time_that_is_left():
    registry, given = Registry(), {}
    for name in ("one", "two"):
        registry.register("writer", name, lambda left, name=name: given.__setitem__(name, left))
    ended = registry.end(5.0)
    assert ended.clean
    assert len(ended.ended) == 2
    assert all(0 < left <= 5.0 for left in given.values())


def test_kinds_are_chosen():
    registry, seen = Registry(), []
    registry.register("writer", "w", lambda _: seen.append("w"))
    registry.register("engine", "e", lambda _: seen.append("e"))
    assert registry.end(1.0, {"engine"}).ended == ("engine e #0",)
    assert seen == ["e"]


def test_one_that_fails_is_named_and_the_others_are_ended():
    def bad(_):
        raise OSError("no such engine")

    ended = together({"bad": bad, "good": lambda _: None}, 1.0)
    assert ended.ended == ("good",)
    assert ended.failed == ("bad: OSError: no such engine",)
    assert not ended.clean


def test_one_that_is_late_is_named_and_nobody_waits_for_it():
    release = threading.Event()
    began = SYSTEM.now()
    ended = together({"slow": lambda _: release.wait(10), "good": lambda _: None}, 0.05)
    assert SYSTEM.now() - began < 2
    release.set()
    assert ended.late == ("slow",)
    assert ended.ended == ("good",)


def test_ending_runs_side_by_side():
    """Each waits for the other: one after the other would never end."""
    barrier = threading.Barrier(2)
    assert together({"a": lambda _: barrier.wait(5), "b": lambda _: barrier.wait(5)}, 5.0).clean


def test_what_is_released_is_let_be():
    registry, seen = Registry(), []
    held = registry.register("writer", "w", lambda _: seen.append("w"))
    held.release()
    held.release()
    assert registry.end(1.0).ended == ()
    assert not seen


@pytest.mark.parametrize("count", [0, 1, 50])
def test_two_of_one_name_are_two(count):
    registry, seen = Registry(), []
    for _ in range(count):
        registry.register("writer", "same", lambda _: seen.append(1))
    assert len(registry.end(5.0).ended) == count == len(seen)
