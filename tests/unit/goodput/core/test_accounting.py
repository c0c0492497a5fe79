"""The ledger closes: GP-04 as a table, GP-01, and the laws that hold for any history."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from everstep.errors import LedgerError
from everstep.events import (
    Arrived,
    Category,
    FaultNoticed,
    GenerationStarted,
    ProcessEnded,
    RunEnded,
    RunStarted,
    SpanClosed,
    SpanOpened,
    StepDone,
    StopBegun,
)
from everstep.goodput.core.accounting import account
from everstep.goodput.core.axis import to_ns
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun

GP_04 = (Fault(37, 0, "sigkill", 1), Fault(38, 1, "exception", 1), Fault(95, 0, "hang", 1))


def close(ledger):
    """What must hold of every ledger, whatever happened."""
    for lane, time in zip(ledger.lanes, ledger.ranks, strict=True):
        assert all(p.end > p.start for p in lane.intervals)
        assert all(a.end <= b.start for a, b in pairwise(lane.intervals)), "two categories own one second"
        covered = sum(p.end - p.start for p in lane.intervals)
        assert covered == sum(s.end - s.start for s in ledger.story.sessions), "a second is missing"
        assert to_ns(time.wall_s) == pytest.approx(covered, abs=1)
        assert sum(time.seconds.values()) + time.unplaced_s == pytest.approx(time.wall_s, abs=1e-9)
        assert bool(time.unplaced_s) <= bool(ledger.errors), "a hole that is not shown as an error"
        assert Category.REDO not in time.seconds
    figures = ledger.figures
    assert figures.steps <= figures.executions
    for share in (figures.training_goodput, figures.infra_goodput, figures.checkpoint_efficiency):
        assert share is None or 0 <= share <= 1
    for row in ledger.recoveries:
        parts = (row.detect_s, row.stop_s, row.regroup_s, row.rebuild_s, row.restore_s, row.redo_s, row.new_step_s)
        assert all(part is None or part >= 0 for part in parts)
        if row.recovery_s is not None:
            assert sum(parts) == pytest.approx(row.recovery_s, abs=1e-9)


# ------------------------------------------------------------------------------------------- GP-04


@pytest.mark.parametrize(
    ("memory", "every", "lost"),
    [(False, 10, [7, 8, 5]), (True, 10, [0, 0, 0]), (False, 0, [37, 38, 95]), (False, 25, [12, 13, 20])],
    ids=["disk tier", "memory tier", "no tier", "a rarer disk tier"],
)
@pytest.mark.parametrize("spans", [True, False], ids=["spans", "steps only"])
def test_work_redone_after_a_rollback_counts_once(memory, every, lost, spans):
    run = SimulatedRun(ranks=2, steps=100, memory_tier=memory, checkpoint_every=every, faults=GP_04, spans=spans)
    ledger = account(run.run())
    close(ledger)
    assert ledger.errors == []
    assert ledger.figures.steps == 100
    assert ledger.figures.executions == 100 + sum(lost)
    assert [r.steps_lost for r in ledger.recoveries] == lost
    assert [r.redo_s for r in ledger.recoveries] == pytest.approx(lost)
    for time in ledger.ranks:
        assert time.seconds[Category.STEP] == pytest.approx(100, abs=1e-6)
        assert time.seconds.get(Category.LOST, 0.0) == pytest.approx(sum(lost), abs=1e-6)
    assert ledger.figures.training_goodput == pytest.approx(100 / ledger.figures.wall_s)


def test_a_fall_back_to_an_older_checkpoint_undoes_steps_of_several_generations():
    """CL-01: the newest checkpoint is damaged, so a generation begins from before the last one began."""
    records = SimulatedRun(
        ranks=2, steps=40, memory_tier=False, faults=[Fault(13, 0, part=1), Fault(24, 1, part=1)]
    ).run()
    older = [
        replace(r, event=replace(r.event, restore_step=None, restored_from=None))
        if isinstance(r.event, GenerationStarted) and r.event.number == 2
        else r
        for r in records
    ]
    ledger = account(older)
    close(ledger)
    for time in ledger.ranks:  # 13 + (24 - 10) were done and did not stand; steps 21 to 40 were done from there
        assert time.seconds[Category.LOST] == pytest.approx(13 + 14)
        assert time.seconds[Category.STEP] == pytest.approx(20)
    assert [r.steps_lost for r in ledger.recoveries] == [3, 24]


def test_a_step_that_one_rank_had_done_is_lost_there_but_not_counted_as_lost_of_the_world():
    """The fault hits between the first rank's optimizer step and the second's."""
    records = SimulatedRun(ranks=2, steps=6, faults=[Fault(4, 1, "exception", 1)]).run()
    first_4 = next(r for r in records if isinstance(r.event, StepDone) and r.event.step == 4 and r.stamp.rank == 1)
    torn = [
        replace(r, event=replace(r.event, restore_step=3))
        if isinstance(r.event, GenerationStarted) and r.event.number
        else r
        for r in records
        if r is not first_4
    ]
    ledger = account(torn)
    close(ledger)
    assert ledger.recoveries[0].steps_lost == 0
    assert ledger.ranks[0].seconds[Category.LOST] == pytest.approx(1)


def test_the_answer_is_the_same_live_and_from_logs():
    run = SimulatedRun(
        ranks=3, steps=30, memory_tier=False, faults=[Fault(17, 1, "sigkill", 0.5), Fault(25, 0, "hang", 0.2)]
    )
    records = run.run()
    for count in range(4, len(records), 97):
        live = account(records[:count])
        close(live)
        assert live.errors == []
        assert not live.closed
    by_process = {}
    for record in records:
        by_process.setdefault(record.stamp.pid, []).append(record)
    files = list(by_process.values())
    random.Random(1).shuffle(files)
    assert account([r for lines in files for r in lines]).ranks == account(records).ranks


def test_until_extends_a_run_that_goes_on():
    records = [r for r in SimulatedRun(steps=5).run() if not isinstance(r.event, RunEnded)]
    ledger = account(records, until_s=records[-1].stamp.wall_s + 4)
    close(ledger)
    assert ledger.figures.wall_s == pytest.approx(records[-1].stamp.mono_s + 4 - records[0].stamp.mono_s, abs=1e-5)


# ------------------------------------------------------------------------------------------- GP-01


def test_an_end_written_at_each_restart_does_not_end_the_run():
    records = SimulatedRun(steps=12, faults=[Fault(4, 0), Fault(8, 1, "sigkill")]).run()
    expected = account(records).ranks
    noisy = []
    for record in records:
        noisy.append(record)
        if isinstance(record.event, FaultNoticed):
            noisy.append(replace(record, event=RunEnded(code=1, reason="restart")))
    ledger = account(noisy)
    close(ledger)
    assert ledger.ranks == expected
    assert ledger.closed


def test_what_the_agent_buries_after_the_end_does_not_reopen_the_run():
    records = SimulatedRun(steps=4).run()
    gone = ProcessEnded(name="store", child_pid=99, status=-9, expected=True)
    late = replace(records[-1], event=gone, stamp=replace(records[-1].stamp, mono_s=records[-1].stamp.mono_s + 0.07))
    ledger = account([*records, late])
    close(ledger)
    assert ledger.closed
    assert ledger.ranks == account(records).ranks


def test_an_end_before_the_start_is_told_and_left_out():
    records = SimulatedRun(steps=3).run()
    early = replace(
        records[0], event=RunEnded(code=0, reason=""), stamp=replace(records[0].stamp, mono_s=1.0, wall_s=1789995001.0)
    )
    ledger = account([early, *records])
    close(ledger)
    assert "before the first RunStarted" in ledger.errors[0]


def test_a_run_taken_up_again_has_two_sessions_and_no_time_between_them():
    first = [
        r for r in SimulatedRun(steps=20, memory_tier=False, checkpoint_every=5).run()
        if not isinstance(r.event, RunEnded) and r.stamp.mono_s < 5013.5
    ]  # fmt: skip
    second = SimulatedRun(steps=20, memory_tier=False, began_mono_s=6000.0, began_wall_s=1_790_001_000.0).run()
    begun = [
        replace(r, event=replace(r.event, restore_step=10, restored_from="disk"))
        if isinstance(r.event, GenerationStarted)
        else r
        for r in second
        if not (
            isinstance(r.event, StepDone | SpanOpened | SpanClosed) and getattr(r.event, "step", 11) in range(1, 11)
        )
    ]
    ledger = account(first + begun)
    close(ledger)
    assert len(ledger.story.sessions) == 2
    assert ledger.figures.wall_s < 40
    assert ledger.figures.steps == 20
    assert ledger.ranks[0].seconds[Category.LOST] == pytest.approx(1.0)  # step 11


def test_records_without_a_beginning_are_refused_with_the_mend():
    records = [r for r in SimulatedRun(steps=3).run() if not isinstance(r.event, RunStarted)]
    with pytest.raises(LedgerError, match=r"agent's own log is missing"):
        account(records)


def test_a_death_that_nobody_recorded_is_a_hole_and_an_error():
    run = SimulatedRun(steps=8, faults=[Fault(4, 1, "sigkill", 0.5)])
    silent = [r for r in run.run() if not isinstance(r.event, FaultNoticed)]
    ledger = account(silent)
    close(ledger)
    assert ledger.ranks[1].unplaced_s > 0
    assert any("cannot be placed" in e and "status -9" in e for e in ledger.errors)
    assert any("nothing says why it ended" in e for e in ledger.errors)


def test_a_span_of_an_unknown_category_is_a_hole():
    run = SimulatedRun(ranks=1, steps=3, data_s=0.2)
    odd = [
        replace(r, event=replace(r.event, category="daydream"))
        if getattr(r.event, "category", "") == "data wait"
        else r
        for r in run.run()
    ]
    ledger = account(odd)
    close(ledger)
    assert ledger.ranks[0].unplaced_s == pytest.approx(0.6)
    assert "daydream" in ledger.errors[0]


# ------------------------------------------------------------------------------------------- laws


def history(seed):
    """A seeded job with seeded faults."""
    rng = random.Random(seed)
    ranks, steps = rng.randint(1, 5), rng.randint(2, 14)
    faults = [
        Fault(rng.randint(1, steps), rng.randrange(ranks), rng.choice(["exception", "hang", "sigkill"]),
              rng.choice([0.01, 0.3, 0.9, 1.0])) for _ in range(rng.randint(0, 4))
    ]  # fmt: skip
    return SimulatedRun(
        ranks=ranks, steps=steps, step_s=rng.choice([0.02, 0.3, 1.0]), data_s=rng.choice([0, 0.05]),
        snapshot_s=rng.choice([0, 0.01]), rebuild_s=rng.choice([0, 0.4]), restore_s=rng.choice([0, 0.1]),
        jitter=rng.choice([0, 0.5]), checkpoint_every=rng.choice([0, 1, 3]), memory_tier=rng.random() < 0.5,
        spares=rng.randint(0, 2), spans=rng.random() < 0.7, injected=rng.random() < 0.7, faults=faults, seed=seed,
    )  # fmt: skip


def check_whole(seed):
    run = history(seed)
    records = run.run()
    ledger = account(records)
    close(ledger)
    assert ledger.errors == [], seed
    assert ledger.figures.steps == run.steps, seed
    assert len(ledger.recoveries) == sum(isinstance(r.event, FaultNoticed) for r in records), seed


def check_damaged(seed):
    """Records dropped, doubled, cut off, clocks that jump: the sums hold, and holes are errors."""
    rng = random.Random(-seed - 1)
    records = history(seed).run()
    start = records[0]
    kinds = (
        SpanClosed,
        SpanOpened,
        Arrived,
        StopBegun,
        FaultNoticed,
        ProcessEnded,
        GenerationStarted,
        RunEnded,
        StepDone,
    )
    dropped = rng.choice(kinds)
    kept = [r for r in records if r is start or not (isinstance(r.event, dropped) and rng.random() < 0.3)]
    kept = kept[: rng.randint(1, len(kept))] if rng.random() < 0.5 else kept
    kept += rng.sample(kept, k=min(5, len(kept)))
    jumped = [
        replace(r, stamp=replace(r.stamp, wall_s=r.stamp.wall_s + 3600)) if rng.random() < 0.2 else r for r in kept
    ]
    close(account([r for r in jumped if not isinstance(r.event, RunStarted)] + [start]))


@pytest.mark.parametrize("batch", range(40))
def test_any_history_closes_without_an_error(batch):
    for seed in range(batch * 5, batch * 5 + 5):
        check_whole(seed)


@pytest.mark.parametrize("batch", range(40))
def test_any_damaged_history_closes_or_says_where_it_does_not(batch):
    for seed in range(batch * 5, batch * 5 + 5):
        check_damaged(seed)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [check_whole, check_damaged])
def test_thousands_of_histories(check):
    for seed in range(200, 4000):
        check(seed)
