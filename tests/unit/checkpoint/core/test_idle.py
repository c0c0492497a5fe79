"""What is hashed when there is time, and how little of the time that is."""

import random

import pytest

from everstep.checkpoint.core.idle import KEPT, LOOK_S, MOST_S, REST, Seen, rest, wanted


def test_the_newest_of_each_rank_first_then_the_one_before():
    seen = [Seen(0, 0, 7, False), Seen(0, 1, 9, False), Seen(0, 2, 8, False), Seen(1, 4, 3, False), Seen(1, 5, 2, True)]
    assert [(one.rank, one.sequence) for one in wanted(seen)] == [(0, 9), (1, 3), (0, 8)]


def test_what_is_hashed_void_or_the_next_to_be_written_over_is_left_alone():
    assert wanted([Seen(0, 0, 0, False), Seen(0, 1, 0, True)]) == []
    assert wanted([Seen(0, n, 5 + n, n >= 2) for n in range(4)]) == []


@pytest.mark.parametrize("seed", range(50))
def test_each_is_asked_for_once_and_is_among_the_newest(seed):
    rng = random.Random(seed)
    seen = [
        Seen(rank, buffer, sequence, rng.random() < 0.5)
        for rank in range(rng.randint(1, 4))
        for buffer, sequence in enumerate(rng.sample(range(12), rng.randint(1, 5)))
    ]
    found = wanted(seen)
    assert len(set(found)) == len(found)
    for one in seen:
        newer = [other for other in seen if other.rank == one.rank and other.sequence > one.sequence]
        assert (one in found) == (one.sequence > 0 and not one.hashed and len(newer) < KEPT)


def test_it_rests_so_many_times_as_long_as_it_worked():
    assert rest(LOOK_S, 0.0, done=True) == LOOK_S
    assert rest(LOOK_S, 2.0, done=True) == REST * 2.0
    assert rest(MOST_S, 0.001, done=True) == LOOK_S


def test_what_is_written_over_faster_than_it_can_be_hashed_is_tried_less_and_less():
    rests = [LOOK_S]
    for _ in range(10):
        rests.append(rest(rests[-1], 0.001, done=False))
    assert rests == sorted(rests)
    assert rests[-1] == MOST_S
    assert rest(MOST_S, 1.0, done=False) == REST
