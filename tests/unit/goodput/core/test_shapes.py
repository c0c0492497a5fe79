"""What is drawn: nothing of a fault is merged away, everything of the loop fits."""

import math

import pytest

from everstep.goodput.core.accounting import Loss, account
from everstep.goodput.core.shapes import Window, bars, curve, thinned, ticks
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun


def test_bars_cover_the_lane_and_keep_what_a_fault_caused():
    run = SimulatedRun(ranks=1, steps=500, step_s=0.1, data_s=0.001, snapshot_s=0.001, spares=0, memory_tier=False,
                       faults=[Fault(333, 0, "exception", 0.5)])  # fmt: skip
    ledger = account(run.run())
    lane = ledger.lanes[0]
    drawn = bars(lane.intervals, Window(ledger.start, ledger.end))
    assert len(drawn) < 250 < len(lane.intervals)
    assert sum(b.width for b in drawn) == pytest.approx(100, abs=0.1)
    assert {"c-detection", "c-stop", "c-regroup", "c-lost", "c-step"} <= {b.css for b in drawn}
    assert any("steps" in b.title and "data wait" in b.title for b in drawn)


@pytest.mark.parametrize(("low", "high"), [(0, 36.4), (2.1, 5.6), (-0.07, 0.3), (0, 1e-6), (3, 3), (0, 86400)])
def test_ticks_are_few_and_inside(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 12
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in found)


def points(values, generation=0, stands=True):
    return [Loss(i * 1000, i, v, generation, stands) for i, v in enumerate(values)]


def test_the_curve_leaves_out_what_is_no_number_and_survives_a_constant():
    assert curve(points([math.nan, math.inf]), Window(0, 10_000)) is None
    flat = curve(points([2.0, math.nan, 2.0]), Window(0, 10_000))
    assert flat is not None
    assert len(flat.points) == 2
    assert flat.low < 2 < flat.high


def test_thinning_keeps_the_peaks_and_the_edges_of_what_was_undone():
    losses = points([math.sin(i / 50) for i in range(20_000)])
    losses[777] = Loss(777_000, 777, 99.0, 0, True)
    losses[5000] = Loss(5_000_000, 5000, 0.0, 0, False)
    kept = thinned(losses)
    assert len(kept) <= 1700
    assert losses[777] in kept
    assert losses[5000] in kept
