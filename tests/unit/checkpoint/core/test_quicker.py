"""Which of two ways is quicker."""

import random

import pytest

from everstep.checkpoint.core.quicker import AGAIN, FIRST, KEPT, SECOND, Quicker


def drive(quicker: Quicker, turns: int, took) -> list[int]:
    """Take so many turns; return the ways."""
    ways = []
    for turn in range(turns):
        way = quicker.choose()
        quicker.took(way, took(way, turn))
        ways.append(way)
    return ways


def test_each_is_tried_in_turn_and_then_the_quicker_one_is_taken():
    assert drive(Quicker(), 10, lambda way, _: (2.0, 1.0)[way]) == [0, 1, 0, 1, 0, 1, 1, 1, 1, 1]
    assert drive(Quicker(), 10, lambda way, _: (1.0, 2.0)[way]) == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert drive(Quicker(), 8, lambda way, _: 1.0)[6:] == [FIRST, FIRST], "of two alike the first"


def test_the_slower_one_is_tried_again_once_in_a_while():
    ways = drive(Quicker(), 2 * KEPT + 5 * (AGAIN + 1), lambda way, _: (1.0, 9.0)[way])
    later = [turn for turn, way in enumerate(ways) if way == SECOND][KEPT:]
    assert later == [2 * KEPT + AGAIN + n * (AGAIN + 1) for n in range(5)]


def test_one_turn_that_was_disturbed_changes_nothing():
    ways = drive(Quicker(), 60, lambda way, turn: 50.0 if turn == 20 else (1.0, 9.0)[way])
    assert set(ways[2 * KEPT :]) == {FIRST}


def test_what_has_become_slower_is_left_after_two_turns_and_what_has_become_quicker_after_two_tries():
    quicker = Quicker()
    drive(quicker, 50, lambda way, _: (1.0, 2.0)[way])
    assert drive(quicker, 5, lambda way, _: (9.0, 2.0)[way]) == [0, 0, 1, 1, 1]
    quicker = Quicker()
    drive(quicker, 2 * KEPT, lambda way, _: (1.0, 2.0)[way])
    ways = drive(quicker, 3 * (AGAIN + 1), lambda way, _: (1.0, 0.1)[way])
    assert set(ways[2 * AGAIN + 2 : -1]) == {SECOND}


@pytest.mark.parametrize("seed", range(50))
def test_over_any_times_it_costs_little_more_than_the_better_way(seed):
    rng = random.Random(seed)
    means = rng.uniform(1, 10), rng.uniform(1, 10)
    spent = 0.0
    quicker = Quicker()
    for _ in range(2000):
        way = quicker.choose()
        took = means[way] * rng.uniform(0.9, 1.1)
        spent += took
        quicker.took(way, took)
    assert spent <= 2000 * min(means) * 1.1 + (KEPT + 2000 / AGAIN) * max(means) * 1.1
