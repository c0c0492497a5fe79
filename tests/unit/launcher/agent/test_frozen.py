"""Who does not die of SIGKILL is told of once, after a while."""

from everstep.launcher.agent.frozen import Undying


def test_who_does_not_die_is_told_of_once():
    undying = Undying(5.0)
    assert undying.look([7, 8], 0.0) == []
    assert undying.look([7], 4.0) == []
    assert undying.look([7, 8], 5.5) == [7]  # 8 had gone; this one is another
    assert undying.look([7, 8], 9.0) == []
    assert undying.told == {7}
    assert undying.look([8], 11.0) == [8]
    assert undying.told == {8}
