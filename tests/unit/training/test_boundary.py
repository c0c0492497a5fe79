"""The place between two steps where a rank leaves: what the agent says early, late, twice, and while the rank waits."""

import threading

import pytest

from everstep.errors import JobDrained
from everstep.training.boundary import Boundary


def stand(generation):
    return {"kind": "drain.stand", "generation": generation}


def until(generation, step):
    return {"kind": "drain.until", "generation": generation, "step": step}


def test_who_is_not_asked_goes_on():
    told = []
    boundary = Boundary(told.append)
    boundary.enter(0)
    for step in range(1, 10):
        boundary.before(step)
    assert told == []


def test_a_rank_says_where_it_stands_and_leaves_after_the_last_step():
    told = []
    boundary = Boundary(told.append)
    boundary.enter(3)
    boundary.before(8)
    boundary.heard(stand(3))
    assert told == [{"kind": "drain.stands", "generation": 3, "begun": 8}]
    boundary.heard(until(3, 9))
    boundary.heard(until(3, 9))
    boundary.before(9)
    with pytest.raises(JobDrained) as left:
        boundary.before(10)
    assert (left.value.step, left.value.code) == (9, 0)
    assert told[1:] == [{"kind": "drain.left", "generation": 3, "step": 9}]


def test_a_rank_that_waits_is_woken_by_the_word():
    told, left = [], []
    boundary = Boundary(told.append)
    boundary.enter(0)
    boundary.heard(stand(0))

    def loop():
        try:
            boundary.before(1)
            boundary.before(2)
        except JobDrained as end:
            left.append(end.step)

    thread = threading.Thread(target=loop)
    thread.start()
    boundary.heard(until(0, 1))
    thread.join(60)
    assert left == [1]


def test_what_is_said_before_the_generation_begins_is_heard_then_and_what_is_of_an_older_one_never():
    told = []
    boundary = Boundary(told.append)
    boundary.heard(stand(0))
    assert told == []
    boundary.enter(0)
    assert told == [{"kind": "drain.stands", "generation": 0, "begun": 0}]
    boundary.enter(1)
    boundary.heard(until(0, 0))
    boundary.before(1)


def test_it_is_no_error_that_a_script_takes_for_a_fault():
    assert not issubclass(JobDrained, Exception)
    assert issubclass(JobDrained, SystemExit)
