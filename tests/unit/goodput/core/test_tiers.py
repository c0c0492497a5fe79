"""What became of the saves of each tier: counts, achieved interval, age."""

from dataclasses import replace

import pytest

from everstep.events import Record, StepDone, TierEvent
from everstep.goodput.core.accounting import account
from everstep.goodput.core.saws import saw
from everstep.goodput.core.shapes import Window
from everstep.goodput.core.words import quoted
from everstep.goodput.summary import tier_to_json
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun


def tiers_of(records):
    return {tier.name: tier for tier in account(records).tiers}


def with_events(records, told):
    """The same run, in which after each step the agent has told what `told` says of it: (seconds later, event)."""
    out = []
    for record in records:
        if isinstance(record.event, TierEvent):
            continue
        out.append(record)
        if isinstance(record.event, StepDone) and record.stamp.rank == 0:
            for later, event in told(record.event.step):
                at = replace(
                    record.stamp, role="agent", rank=None, mono_s=record.stamp.mono_s + later,
                    wall_s=record.stamp.wall_s + later,
                )  # fmt: skip
                out.append(Record(at, event))
    return out


def slow_disk(step):
    """Every 10 steps are meant; each save takes 14 s, so each second one is left out; the one of step 60 fails."""
    if step % 20 == 10 and step > 10:
        yield 0.0, TierEvent(tier="disk", what="coalesced", step=step)
    if step % 20 == 0:
        yield 0.1, TierEvent(tier="disk", what="taken", step=step)
        what = "failed" if step == 60 else "committed"
        yield 14.1, TierEvent(tier="disk", what=what, step=step, bytes=1000, seconds=14.0, text="a full disk")


def test_counts_sums_the_achieved_interval_and_both_ages():
    records = with_events(SimulatedRun(ranks=2, steps=139, step_s=1.0).run(), slow_disk)
    disk = tiers_of(records)["disk"]
    assert (disk.taken, disk.coalesced, disk.committed, disk.failed) == (6, 6, 5, 1)
    assert (disk.bytes, disk.seconds, disk.save_s) == (5000, 70.0, 14.0)
    assert disk.newest_step == 120
    assert disk.interval_steps == pytest.approx(25)  # 20, 40, 80, 100, 120
    step_s = disk.interval_s / disk.interval_steps
    assert disk.age_s == pytest.approx(19 * step_s, abs=1)  # from the snapshot, not from the commit
    assert disk.oldest_s == pytest.approx(40 * step_s + 14.0, abs=1)  # of step 40, until that of 80 is whole


def test_memory_is_a_tier_that_the_ranks_tell_of_with_each_step():
    memory = tiers_of(SimulatedRun(ranks=3, steps=40, snapshot_s=0.25).run())["memory"]
    assert (memory.taken, memory.committed, memory.failed, memory.newest_step) == (40, 40, 0, 40)
    assert memory.bytes == 40 * 3 * 20_000_000
    assert memory.seconds == pytest.approx(10.0)
    assert memory.interval_steps == 1


def test_a_step_that_not_every_rank_has_is_taken_and_not_whole():
    records = [
        replace(r, event=replace(r.event, snapshot_bytes=0))
        if isinstance(r.event, StepDone) and r.event.step == 40 and r.stamp.rank == 1
        else r
        for r in SimulatedRun(ranks=2, steps=40).run()
    ]
    memory = tiers_of(records)["memory"]
    assert (memory.taken, memory.committed, memory.newest_step) == (40, 39, 39)


def test_steps_that_are_done_again_make_no_shorter_interval():
    run = SimulatedRun(ranks=2, steps=40, memory_tier=False, checkpoint_every=10, faults=[Fault(29, 0)])
    disk = tiers_of(run.run())["disk"]
    assert disk.interval_steps == 10
    assert disk.newest_step == 40


def test_a_run_that_kept_nothing_has_no_tiers():
    assert tiers_of(SimulatedRun(ranks=2, steps=5, memory_tier=False).run()) == {}


def test_the_nearest_tier_comes_first():
    def told(step):
        for tier in ("elsewhere", "disk", "peer", "local"):
            yield 0.1, TierEvent(tier=tier, what="committed", step=step)

    records = with_events(SimulatedRun(ranks=2, steps=5).run(), told)
    assert list(tiers_of(records)) == ["memory", "peer", "local", "disk", "elsewhere"]


def test_efficiency_is_quoted_with_interval_and_age():
    ledger = account(with_events(SimulatedRun(ranks=2, steps=139, step_s=1.0).run(), slow_disk))
    assert "disk: every 25 steps, step 120, 19" in quoted(ledger.tiers)
    assert quoted([]) == "no tier that saved anything"


def test_json_has_the_names_that_are_fixed():
    disk = tiers_of(SimulatedRun(steps=40, checkpoint_every=10).run())["disk"]
    assert {
        "tier", "taken", "coalesced", "committed", "failed", "bytes", "seconds", "achieved_interval_steps",
        "achieved_interval_s", "newest_durable_step", "age_s",
    } <= set(tier_to_json(disk))  # fmt: skip


def test_the_picture_shows_the_age_as_a_saw_whose_teeth_end_at_the_commits():
    ledger = account(with_events(SimulatedRun(ranks=2, steps=139, step_s=1.0).run(), slow_disk))
    disk = next(tier for tier in ledger.tiers if tier.name == "disk")
    drawn = saw(disk, Window(ledger.start, ledger.end), ledger.story.sessions)
    assert drawn.high_s == pytest.approx(disk.oldest_s)
    assert drawn.path.count("M") == 1
    assert drawn.path.count("L") == 9
    assert (len(drawn.bars), len(drawn.failed), len(drawn.left_out)) == (5, 1, 6)


def test_many_saves_are_drawn_in_few_points():
    ledger = account(SimulatedRun(ranks=2, steps=3000, step_s=0.01).run())
    (memory,) = [tier for tier in ledger.tiers if tier.name == "memory"]
    drawn = saw(memory, Window(ledger.start, ledger.end), ledger.story.sessions)
    assert drawn.path.count("L") < 1300
    assert drawn.bars == []
