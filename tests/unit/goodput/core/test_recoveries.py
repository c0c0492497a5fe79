"""What one fault cost, part by part, against a simulated clock."""

from dataclasses import replace

import pytest

from everstep.events import Category, FaultNoticed, GenerationStarted, ProcessEnded, Restored, RunEnded
from everstep.goodput.core.accounting import account
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun


def only(fault, **run):
    ledger = account(SimulatedRun(ranks=3, steps=20, rebuild_s=0.5, restore_s=0.25, faults=[fault], **run).run())
    assert ledger.errors == []
    assert len(ledger.recoveries) == 1
    return ledger.recoveries[0]


@pytest.mark.parametrize(
    ("type_", "detect", "held"), [("exception", 0.001, "kept"), ("hang", 3.0, "kept"), ("sigkill", 0.001, "spare")]
)
def test_the_parts_are_what_the_clock_says(type_, detect, held):
    row = only(Fault(8, 1, type_, 0.5))
    assert (row.step, row.rank, row.type, row.took_over, row.restored_from) == (8, 1, type_, held, "memory")
    assert row.detect_s == pytest.approx(detect)
    assert row.stop_s == pytest.approx(0.004)
    assert row.regroup_s == pytest.approx(0.015)
    assert row.rebuild_s == pytest.approx(0.5)
    assert row.restore_s == pytest.approx(0.25)
    assert row.redo_s == 0
    assert row.new_step_s == pytest.approx(1.0)
    assert row.recovery_s == pytest.approx(detect + 0.004 + 0.015 + 0.75 + 1.0)
    assert row.steps_lost == 0


def test_without_a_spare_the_rank_waits_for_a_new_process_in_start_up():
    run = SimulatedRun(ranks=2, steps=10, spares=0, startup_s=4.0, faults=[Fault(5, 1, "sigkill", 0.5)])
    ledger = account(run.run())
    assert ledger.errors == []
    assert ledger.recoveries[0].took_over == "started"
    assert ledger.recoveries[0].regroup_s == pytest.approx(4.01, abs=0.01)
    waits, starts = (r.seconds for r in ledger.ranks)
    assert waits[Category.REGROUP] == pytest.approx(4.02, abs=0.02)
    assert starts[Category.STARTUP] == pytest.approx(8.01, abs=0.02)


def test_nature_s_faults_begin_at_the_last_mark_or_with_the_death():
    row = only(Fault(8, 1, "hang", 0.5), injected=False)
    assert (row.type, row.noticed_by) == ("stall", "page")
    assert row.detect_s == pytest.approx(3.0)
    records = [
        replace(r, event=replace(r.event, last_mark_s=None)) if isinstance(r.event, FaultNoticed) else r
        for r in SimulatedRun(steps=9, injected=False, faults=[Fault(4, 0, "sigkill", 0.5)]).run()
    ]
    ledger = account(records)
    assert ledger.errors == []
    assert ledger.recoveries[0].detect_s == pytest.approx(0.0005)
    assert ledger.recoveries[0].type == "death"


def test_a_death_recorded_later_names_the_cause_and_the_first_record_the_time():
    records = SimulatedRun(steps=9, injected=False, faults=[Fault(4, 0, "sigkill", 0.5)]).run()
    told = next(r for r in records if isinstance(r.event, FaultNoticed))
    peer = replace(
        told,
        event=FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=1, text="connection reset"),
        stamp=replace(told.stamp, mono_s=told.stamp.mono_s - 0.0004),
    )
    row = account([*records, peer]).recoveries[0]
    assert (row.rank, row.type, row.noticed_by) == (0, "death", "worker")
    assert row.detect_s == pytest.approx(0.0005, abs=0.0002)


def test_a_second_fault_before_the_way_back_is_over_is_in_both_rows_and_once_in_the_seconds():
    faults = [Fault(8, 1, "exception", 0.5), Fault(8, 0, "exception", 0.7)]
    ledger = account(SimulatedRun(ranks=2, steps=20, faults=faults).run())
    first, second = ledger.recoveries
    assert ledger.errors == []
    assert first.recovered == second.recovered
    assert first.recovery_s > second.recovery_s
    assert ledger.ranks[0].seconds[Category.LOST] == pytest.approx(1.2)


def test_two_faults_of_one_generation_are_two_rows():
    records = SimulatedRun(ranks=3, steps=9, faults=[Fault(4, 0, "sigkill", 0.5)]).run()
    harm = next(r for r in records if type(r.event).__name__ == "FaultInjected")
    other = replace(
        harm,
        event=replace(harm.event, fault=1, injured_rank=2, type="exception"),
        stamp=replace(harm.stamp, rank=2, pid=1002, mono_s=harm.stamp.mono_s + 0.002),
    )
    rows = account([*records, other]).recoveries
    assert [(r.rank, r.type) for r in rows] == [(0, "sigkill"), (2, "exception")]


def test_a_fault_after_the_last_step_is_over_when_the_function_is():
    row = only(Fault(20, 2, "sigkill", 1.0))
    assert row.recovery_s is not None
    assert row.steps_lost == 0


def test_a_fault_that_ended_the_job_has_no_way_back():
    records = SimulatedRun(ranks=2, steps=9, faults=[Fault(4, 0, "sigkill", 0.5)]).run()
    cut = next(i for i, r in enumerate(records) if isinstance(r.event, GenerationStarted) and r.event.number == 1)
    last = records[cut]
    gone = replace(
        last, event=ProcessEnded(name="worker-1", child_pid=1001, status=-15, expected=True, child_slot=1, child_rank=1)
    )
    end = replace(
        last, event=RunEnded(code=1, reason="three in a row"), stamp=replace(last.stamp, mono_s=last.stamp.mono_s + 1)
    )
    ledger = account([*records[:cut], gone, end])
    assert ledger.errors == []
    row = ledger.recoveries[0]
    assert row.recovery_s is None
    assert row.restored_from is None
    assert ledger.ranks[1].seconds[Category.TAIL] == pytest.approx(1.0, abs=0.02)


def _undecided(number, **run):
    """The records of a run in which nodes had not agreed when roster `number` was entered."""
    return [
        replace(r, event=replace(r.event, restore_step=None, restored_from=None, decided=False))
        if isinstance(r.event, GenerationStarted) and r.event.number == number
        else r
        for r in SimulatedRun(**run).run()
    ]


def test_what_nodes_agreed_on_after_the_roster_is_had_from_its_ranks():
    run = {"ranks": 2, "steps": 12, "faults": [Fault(6, 1, "exception", 0.5)]}
    ledger = account(_undecided(1, **run))
    assert (ledger.figures.steps, ledger.errors) == (12, [])
    assert ledger.recoveries == account(SimulatedRun(**run).run()).recoveries


def test_a_generation_that_ended_before_nodes_had_agreed_took_no_step_with_it():
    records = _undecided(1, ranks=2, steps=12, faults=[Fault(6, 1, "exception", 0.5), Fault(6, 0, "exception", 0.5)])
    records = [r for r in records if not (isinstance(r.event, Restored) and r.stamp.generation == 1)]
    ledger = account(records)
    assert ledger.figures.steps == 12
    assert [(row.steps_lost, row.restored_from) for row in ledger.recoveries] == [(0, "memory"), (0, "memory")]
