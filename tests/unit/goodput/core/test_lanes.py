"""The first pass: spans, stages, gaps, and what a worker could not say."""

from dataclasses import replace

import pytest

from everstep.events import (
    Category,
    GenerationStarted,
    ProcessStarted,
    Restored,
    SpanClosed,
    SpanOpened,
    StepDone,
    StepValues,
    StopBegun,
)
from everstep.goodput.core.accounting import account
from everstep.goodput.core.lanes import Interval, overlay
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun


def seconds(records, rank=0):
    ledger = account(records)
    assert ledger.errors == []
    return ledger.ranks[rank].seconds


def test_overlay_cuts_what_lies_under_it():
    lane = [Interval(0, 10, Category.STEP), Interval(10, 20, Category.SNAPSHOT)]
    out = overlay(lane, Interval(5, 12, Category.STOP))
    assert [(p.start, p.end, p.category) for p in out] == [
        (0, 5, Category.STEP), (5, 12, Category.STOP), (12, 20, Category.SNAPSHOT),
    ]  # fmt: skip
    assert overlay(lane, Interval(7, 7, Category.STOP)) == lane


def test_the_innermost_span_owns_the_time():
    run = SimulatedRun(ranks=1, steps=4)
    records = run.run()
    step = next(
        r for r in records if isinstance(r.event, SpanOpened) and r.event.category == "step" and r.event.step == 2
    )
    t = step.stamp.mono_s
    inner = [
        replace(step, stamp=replace(step.stamp, mono_s=t + a), event=e)
        for a, e in (
            (0.1, SpanOpened(category="data wait")), (0.2, SpanOpened(category="checkpoint stall")),
            (0.5, SpanClosed(category="checkpoint stall")), (0.7, SpanClosed(category="data wait")),
        )
    ]  # fmt: skip
    spent = seconds([*records, *inner])
    assert spent[Category.CHECKPOINT_STALL] == pytest.approx(0.3)
    assert spent[Category.DATA_WAIT] == pytest.approx(0.3)
    assert spent[Category.STEP] == pytest.approx(3.4)


def test_phases_and_pauses_are_not_steps():
    records = SimulatedRun(ranks=1, steps=4).run()
    step = next(r for r in records if isinstance(r.event, SpanOpened) and r.event.step == 3)
    t = step.stamp.mono_s
    phase = [
        replace(step, stamp=replace(step.stamp, mono_s=t + a), event=e)
        for a, e in (
            (0.2, SpanOpened(category="phase")), (0.4, SpanClosed(category="phase")),
            (0.5, SpanOpened(category="paused")), (0.8, SpanClosed(category="paused")),
        )
    ]  # fmt: skip
    spent = seconds([*records, *phase])
    assert (spent[Category.PHASE], spent[Category.PAUSED]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_spans_that_close_while_the_function_unwinds_are_no_error():
    records = SimulatedRun(ranks=2, steps=6, data_s=0.1, faults=[Fault(3, 1, "exception", 0.5)]).run()
    stop = next(r for r in records if isinstance(r.event, StopBegun) and r.stamp.rank == 0)
    late = replace(stop, event=SpanClosed(category="step"), stamp=replace(stop.stamp, mono_s=stop.stamp.mono_s + 0.001))
    seconds([*records, late])


def test_a_span_closed_that_nobody_opened_is_an_error():
    records = SimulatedRun(ranks=1, steps=3).run()
    place = replace(records[5].stamp, rank=0, role="worker", pid=1000, mono_s=5003.5)
    odd = replace(records[-3], event=SpanClosed(category="restore"), stamp=place)
    assert "'restore' was closed that was not open" in account([*records, odd]).errors[0]


def test_a_worker_that_hears_of_its_roster_before_the_agent_writes_it_down_loses_nothing():
    records = SimulatedRun(ranks=2, steps=6, rebuild_s=0.5, faults=[Fault(3, 1, "exception", 0.5)]).run()
    roster = next(r for r in records if isinstance(r.event, GenerationStarted) and r.event.number == 1)
    late = replace(roster, stamp=replace(roster.stamp, mono_s=roster.stamp.mono_s + 0.002))
    spent = seconds([late if r is roster else r for r in records])
    assert spent[Category.REGROUP] == pytest.approx(0.025, abs=0.003)


def test_restored_alone_tells_of_the_restore_where_no_span_does():
    run = SimulatedRun(
        ranks=2, steps=6, restore_s=0.4, rebuild_s=0.5, spans=False, faults=[Fault(3, 1, "exception", 0.5)]
    )
    records = run.run()
    assert any(isinstance(r.event, Restored) for r in records)
    spent = seconds(records)
    assert spent[Category.RESTORE] == pytest.approx(0.4)


def test_the_zygote_s_start_before_the_flags_are_read_is_the_run_s_start():
    records = SimulatedRun(ranks=1, steps=3, startup_s=2).run()
    first = records[0]
    early = replace(
        first, event=ProcessStarted(name="zygote", child_pid=99, incarnation="5eed5eed.99.1"),
        stamp=replace(first.stamp, mono_s=first.stamp.mono_s - 0.5),
    )  # fmt: skip
    assert seconds([early, *records])[Category.STARTUP] == pytest.approx(2.5)


def test_a_spare_s_idle_time_stands_apart():
    ledger = account(SimulatedRun(ranks=2, steps=9, spares=1, faults=[Fault(4, 1, "sigkill", 0.5)]).run())
    first, second = ledger.spares
    assert first.took == (1, 1)
    assert second.took is None
    assert all(Category.IDLE_SPARE not in r.seconds for r in ledger.ranks)
    assert [at for at, _ in ledger.lanes[1].holders][1] == first.end


def test_values_that_come_a_step_late_belong_to_their_step():
    records = SimulatedRun(ranks=1, steps=4).run()
    late = []
    for record in records:
        if isinstance(record.event, StepDone):
            values = StepValues(step=record.event.step, values=record.event.values)
            late.append(replace(record, event=replace(record.event, values={})))
            late.append(replace(record, event=values, stamp=replace(record.stamp, mono_s=record.stamp.mono_s + 0.05)))
        else:
            late.append(record)
    assert [p.value for p in account(late).losses] == [p.value for p in account(records).losses]
