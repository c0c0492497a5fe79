"""The definitions of DESIGN, 'Ledger', and which fault-free step they are built on."""

from dataclasses import replace

import pytest

from everstep.events import Category, StepDone
from everstep.goodput.core.accounting import account
from everstep.goodput.core.figures import median_step_s
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun


def test_the_fault_free_step_is_the_median_of_settled_steps_and_says_so():
    slow_start = [
        replace(r, event=replace(r.event, seconds=9.0)) if isinstance(r.event, StepDone) and r.event.step <= 3 else r
        for r in SimulatedRun(steps=10).run()
    ]
    figures = account(slow_start).figures
    assert figures.step_s == pytest.approx(1.0)
    assert "outside the first 3 of each generation" in figures.step_source


def test_a_twin_lends_its_median():
    twin = account(SimulatedRun(steps=10, step_s=0.8).run())
    figures = account(SimulatedRun(steps=10).run(), twin_step_s=median_step_s(twin.story, twin.lanes)).figures
    assert figures.step_s == pytest.approx(0.8)
    assert figures.step_source == "median of the fault-free twin"
    assert figures.training_goodput == pytest.approx(10 * 0.8 / figures.wall_s)


def test_few_steps_are_all_taken_and_that_is_said():
    assert "all of this run's steps" in account(SimulatedRun(steps=2).run()).figures.step_source
    assert account(SimulatedRun(steps=10).run()[:5]).figures.step_source == "no step was recorded"


def test_a_goodput_above_one_is_shown_as_one_with_a_note():
    figures = account(SimulatedRun(steps=10).run(), twin_step_s=3.0).figures
    assert figures.training_goodput == 1.0
    assert "would take longer than the run did" in figures.notes[0]


def test_infra_goodput_takes_away_what_faults_caused_and_not_the_first_start():
    calm = account(SimulatedRun(ranks=2, steps=10, startup_s=30).run())
    assert calm.figures.infra_goodput == 1.0
    ledger = account(SimulatedRun(ranks=2, steps=10, startup_s=4, spares=0, faults=[Fault(5, 1, "sigkill", 0.5)]).run())
    harmed = ledger.figures.wall_s - (0.001 + 0.004 + 4.01 + 0.0)
    assert ledger.figures.infra_goodput == pytest.approx(harmed / ledger.figures.wall_s, abs=1e-3)


def test_checkpoint_efficiency_is_the_time_that_was_not_blocked():
    ledger = account(SimulatedRun(ranks=2, steps=10, snapshot_s=0.1).run())
    assert ledger.ranks[0].seconds[Category.SNAPSHOT] == pytest.approx(1.0)
    assert ledger.figures.checkpoint_efficiency == pytest.approx(1 - 1.0 / ledger.figures.wall_s)
