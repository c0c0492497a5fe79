"""LOCAL_RANK: who goes on keeps its place, a newcomer takes the lowest that is free."""

from everstep.launcher.nodes.core.places import places
from everstep.recovery.core.words import Incarnation, Member


def who(pid):
    return Incarnation("b", pid, 1)


def member(rank, pid):
    return Member(rank, who(pid), "n", 0, False, "kept")


def test_at_the_start_places_stand_in_the_order_of_ranks():
    assert places([member(3, 30), member(2, 20)], {}, smaller=False) == {who(20): 0, who(30): 1}


def test_a_spare_takes_the_place_of_the_rank_that_it_takes():
    before = {who(20): 0, who(30): 1}
    assert places([member(2, 99), member(3, 30)], before, smaller=False) == {who(99): 0, who(30): 1}


def test_who_comes_from_a_lost_node_takes_a_place_above_and_nobody_is_moved():
    before = {who(20): 0, who(30): 1}
    found = places([member(0, 70), member(1, 71), member(2, 20), member(3, 30)], before, smaller=False)
    assert found == {who(70): 2, who(71): 3, who(20): 0, who(30): 1}


def test_a_world_that_has_become_smaller_is_numbered_anew():
    before = {who(20): 0, who(30): 1, who(40): 2}
    assert places([member(1, 30), member(2, 40)], before, smaller=True) == {who(30): 0, who(40): 1}
