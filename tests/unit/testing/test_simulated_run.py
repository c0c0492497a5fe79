"""The simulated job itself: the same seed, the same ledger; every record survives its JSON."""

from everstep.events import Record, StepDone
from everstep.testing.simulated_run import SimulatedFault, SimulatedRun, showcase


def test_the_seed_decides():
    assert showcase(1).run() == showcase(1).run()
    assert showcase(1).run() != showcase(2).run()


def test_records_survive_their_json_form():
    for record in showcase().run()[:400]:
        assert Record.from_json(record.to_json()) == record


def test_a_step_has_the_same_loss_whenever_it_is_done():
    run = SimulatedRun(ranks=1, steps=12, memory_tier=False, faults=[SimulatedFault(9, 0, part=1.0)])
    losses = {}
    for record in run.run():
        if isinstance(record.event, StepDone):
            losses.setdefault(record.event.step, set()).add(record.event.values["loss"])
    assert sum(len(found) for found in losses.values()) == 12
