"""Intents: one for all ranks, ahead of all of them; and why ranks may not choose for themselves (E33)."""

import random

import pytest

from everstep.checkpoint.core import intents
from everstep.errors import UsageError

STEP_S, WRITE_S, SPREAD, HOURS = 0.4, 275.0, 0.02, 6.0


def _write_time(rng):
    return WRITE_S * rng.uniform(1 - SPREAD, 1 + SPREAD)


def rank_by_rank(world_size, rng, interval):
    """Each rank takes the newest due step when its own writer is free: the way that does not complete."""
    taken = []
    for _ in range(world_size):
        now, mine = 0.0, set()
        while now < HOURS * 3600:
            mine.add(int(now / STEP_S) // interval * interval)
            now += _write_time(rng)
        taken.append(mine)
    return len(set.intersection(*taken)), max(map(len, taken))


def by_intents(world_size, rng, interval):
    """The coordinator chooses for all when the slowest writer is done."""
    plan, now, committed, tried = intents.Plan(interval), 0.0, 0, 0
    while now < HOURS * 3600:
        plan, choice = intents.choose(intents.saw(plan, int(now / STEP_S)))
        now = max(now, choice.step * STEP_S) + max(_write_time(rng) for _ in range(world_size))
        tried, committed = tried + 1, committed + 1
    return committed, tried


@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("interval", [1, 100])
def test_e33_ranks_that_coalesce_alone_complete_next_to_nothing_and_intents_complete_all(world_size, interval):
    seeds = [random.Random(seed) for seed in range(5 if world_size == 64 else 20)]
    alone = [rank_by_rank(world_size, rng, interval) for rng in seeds]
    assert min(of for _, of in alone) >= 70
    luck = {(2, 100): 60, (8, 100): 15, (64, 100): 6}.get((world_size, interval), 3)  # of 79
    assert sum(whole for whole, _ in alone) / len(alone) <= luck
    for rng in seeds:
        committed, tried = by_intents(world_size, rng, interval)
        assert committed == tried >= 60


def test_multiples_of_the_interval_one_after_the_other():
    plan, steps = intents.Plan(20), []
    for _ in range(4):
        plan, choice = intents.choose(plan)
        steps.append(choice.step)
        plan = intents.saw(plan, choice.step)
    assert steps == [20, 40, 60, 80]
    assert "multiple of 20" in choice.reason


def test_what_cannot_be_taken_any_more_is_left_out_by_name():
    plan, choice = intents.choose(intents.saw(intents.Plan(20, last=20), 95))
    assert (choice.step, choice.left_out) == (100, (40, 60, 80))
    assert "95" in choice.reason
    assert plan.last == 100


def test_a_rank_at_the_multiple_itself_is_past_it():
    assert intents.choose(intents.saw(intents.Plan(20), 20))[1].step == 40


def test_the_lead_grows_until_intents_come_in_time_and_not_for_ever():
    plan, seen = intents.Plan(1), 1000
    for _ in range(50):
        plan, choice = intents.choose(intents.saw(plan, seen))
        seen += 40  # steps that pass while a message is under way
        if choice.step > seen:
            break
        plan = intents.late(plan, seen)
    assert choice.step > seen
    for _ in range(50):
        plan = intents.late(plan, seen)
    assert plan.lead == intents.MAX_LEAD


def test_a_new_generation_is_due_again_from_where_it_begins():
    plan, _ = intents.choose(intents.saw(intents.Plan(20), 130))
    plan, choice = intents.choose(intents.rewind(plan, 95))
    assert (choice.step, choice.left_out, plan.lead) == (100, (), 0)


@pytest.mark.sample(80)
@pytest.mark.parametrize("seed", range(200))
def test_an_intent_is_a_multiple_ahead_of_all_that_is_known_and_none_is_lost_without_a_word(seed):
    rng = random.Random(seed)
    plan = intents.Plan(rng.randint(1, 50))
    told = {0}
    for _ in range(30):
        plan = rng.choice([intents.saw, intents.late])(plan, plan.seen + rng.randint(0, 100))
        before = plan
        plan, choice = intents.choose(plan)
        assert choice.step % plan.interval == 0
        assert choice.step > max(before.seen + before.lead, before.last)
        told |= {choice.step, *choice.left_out}
    assert told == set(range(0, plan.last + 1, plan.interval))


@pytest.mark.parametrize("interval", [0, -5])
def test_an_impossible_interval_is_refused_with_the_mend(interval):
    with pytest.raises(UsageError, match="give 1 or more"):
        intents.Plan(interval)


def test_a_fresh_plan_begins_with_the_first_step_and_its_lead_doubles_from_one():
    assert intents.choose(intents.Plan(1))[1].step == 1
    plan, leads = intents.Plan(1), []
    for _ in range(12):
        plan = intents.late(plan, 5)
        leads.append(plan.lead)
    assert leads == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]
