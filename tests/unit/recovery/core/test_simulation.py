"""The real tables in worlds that an adversary runs: every law holds, every run ends."""

from dataclasses import replace

import pytest

from everstep.recovery.core import world
from everstep.recovery.core.words import Policy
from everstep.testing.world import Setting, SimulatedWorld, Violation

SIZES = {2: 40, 3: 40, 8: 15, 64: 1}  # how many seeds of each in the quick tier


@pytest.mark.parametrize("first", range(0, 150, 10))
def test_any_seed(first):
    for seed in range(first, first + 10):
        SimulatedWorld(Setting.drawn(seed)).run()


@pytest.mark.parametrize("ranks", SIZES)
def test_sizes(ranks):
    for seed in range(SIZES[ranks]):
        SimulatedWorld(Setting.drawn(seed, ranks=ranks)).run()


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "part"), [(ranks, part) for ranks in (None, *SIZES) for part in range(10)])
def test_thousands_of_seeds(ranks, part):
    many = 5 * SIZES.get(ranks, 200)
    for seed in range(10_000 + part * many, 10_000 + (part + 1) * many):
        SimulatedWorld(Setting.drawn(seed, ranks=ranks)).run()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_without_harm_nothing_is_restarted(ranks):
    for seed in range(3):
        policy = Policy(ranks, max_restarts=0)
        setting = Setting(seed, ranks, nodes=min(2, ranks), harms=0, policy=policy, slowness=(0.0, 0.6), hale=True)
        run = SimulatedWorld(setting)
        ends = run.run()
        assert {end.code for end in ends} == {0}
        assert [len(roster.members) for roster in run.board.values()] == [ranks, 0]


def test_every_harm_is_survived_where_nothing_forbids_it():
    """With endless patience, processes to spare and a board that answers, only a bad exit spoils a job."""
    for seed in range(60):
        drawn = Setting.drawn(seed, ranks=3)
        endless = {"max_restarts": None, "same_step_limit": 1000, "patience": 1000}
        policy = replace(drawn.policy, **endless, start_deadline_s=1e9, drain_deadline_s=1e9)
        setting = replace(
            drawn, policy=policy, starved=False, sickly=False, mute=False, lost_checkpoints=False, end_wanted=False
        )
        for end in SimulatedWorld(setting).run():
            assert end.code == 0 or "after all had completed" in end.reason or "before they had a rank" in end.reason


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_any_seed_where_the_world_may_shrink(first):
    for seed in range(first, first + 30):
        SimulatedWorld(Setting.shrinking(seed)).run()


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "part"), [(ranks, part) for ranks in (None, *SIZES) for part in range(5)])
def test_thousands_of_seeds_where_the_world_may_shrink(ranks, part):
    many = 5 * SIZES.get(ranks, 200)
    for seed in range(10_000 + part * many, 10_000 + (part + 1) * many):
        SimulatedWorld(Setting.shrinking(seed, ranks)).run()


def test_a_world_that_may_shrink_to_one_goes_on_to_the_end():
    """Nobody comes in the place of the lost: it ends well with whoever is left, or for want of anybody."""
    sizes = set()
    policy = Policy(3, same_step_limit=1000, patience=1000, min_world_size=1, replace_deadline_s=0.0)
    for seed in range(40):
        world = SimulatedWorld(Setting(seed, spares=0, harms=4, policy=policy, starved=True, hale=True))
        (end,) = world.run()
        left = len([roster for _, roster in sorted(world.board.items()) if roster.members][-1].members)
        nobody = f"fresh processes for {left} of {left} ranks" in end.reason
        assert end.code == 0 or nobody or "after all had completed" in end.reason
        if end.code == 0:
            sizes.add(left)
    assert sizes == {1, 2, 3}


def test_the_same_seed_is_the_same_run():
    setting = Setting.drawn(7)
    one, other = SimulatedWorld(setting), SimulatedWorld(setting)
    one.run(), other.run()
    assert (one.story(), one.moves) == (other.story(), other.moves)


def test_a_violation_tells_seed_and_story(monkeypatch):
    monkeypatch.setattr(world, "TRANSITIONS", {**world.TRANSITIONS, world.Phase.FINISHING: {}})
    with pytest.raises(Exception, match="Setting") as caught:
        SimulatedWorld(Setting.drawn(3)).run()
    assert "Setting(seed=3" in str(caught.value)


def test_a_broken_law_is_a_failed_assertion():
    assert issubclass(Violation, AssertionError)
