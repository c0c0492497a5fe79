"""The order of a resume (E24, B3), and every place at which a loop over epochs can be cut (CL-13)."""

import copy
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.training.alone import AloneParts, NoKeeper
from everstep.training.loop import Steps
from everstep.training.parts import Asked


def test_an_iterator_draws_when_it_is_made():
    """E24: generators restored before `iter(loader)` give another next draw; restored after it, the right one."""
    loader = DataLoader(range(8))
    kept = torch.get_rng_state()
    right = torch.rand(1)
    torch.set_rng_state(kept)
    iter(loader)
    assert torch.rand(1) != right
    iter(loader)
    torch.set_rng_state(kept)
    assert torch.rand(1) == right


class MemoryKeeper(NoKeeper):
    """Keeps each step's state in this process; says in which order it was called."""

    def __init__(self, began_from=None):
        super().__init__()
        self.calls, self.saved, self._from = [], {}, began_from

    def open(self, state, loader, asked):
        self.calls.append("open")
        self._things = {**state, "loader": loader, "epochs": self.epochs}

    def restore(self, total):
        del total
        self.calls.append("restore")
        if self._from is None:
            return 0
        for name, thing in self._things.items():
            thing.load_state_dict(copy.deepcopy(self._from["state"][name]))
        return self._from["step"]

    def restore_randomness(self):
        self.calls.append("randomness")
        if self._from is not None:
            torch.set_rng_state(self._from["torch"])
            random.setstate(self._from["python"])
            np.random.set_state(self._from["numpy"])

    def take(self, step):
        self.saved[step] = {
            "step": step,
            "state": {name: copy.deepcopy(thing.state_dict()) for name, thing in self._things.items()},
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }


TOTAL = 23  # three epochs of seven batches, and two


def run(keeper, seed, loader_of, total=TOTAL):
    parts = AloneParts(0, torch.device("cpu"))
    parts.keeper = keeper
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loader = loader_of(keeper)
    told = []
    for step, batch in Steps(parts, total, loader, {}, dict).iterate(Asked()):
        told.append((step, batch.tolist(), torch.rand(1).item(), random.random(), np.random.rand()))
    return told


def shuffled(keeper):
    class Noticing(StatefulDataLoader):
        def __iter__(self):
            keeper.calls.append("iter")
            return super().__iter__()

    return Noticing(range(28), batch_size=4, shuffle=True)


def test_generators_are_restored_after_the_iterator_is_made():
    keeper = MemoryKeeper()
    run(keeper, 1, shuffled, total=1)
    assert keeper.calls == ["open", "restore", "iter", "randomness"]


@pytest.fixture(scope="module")
def whole():
    keeper = MemoryKeeper()
    return keeper, run(keeper, 1, shuffled)


def test_an_epoch_has_every_sample_once(whole):
    _, told = whole
    for epoch in range(3):
        seen = [n for _, batch, *_ in told[7 * epoch : 7 * epoch + 7] for n in batch]
        assert sorted(seen) == list(range(28))


@pytest.mark.parametrize("cut", range(1, TOTAL))
def test_a_loop_that_is_cut_anywhere_goes_on_to_the_bit(whole, cut):
    """In the middle of an epoch, before its last batch, between two epochs: the same batches, the same draws."""
    keeper, told = whole
    again = run(MemoryKeeper(keeper.saved[cut]), 2, shuffled)
    assert again == told[cut:]


def test_a_break_leaves_the_step_in_which_it_stands_undone():
    """B7: a step is done when control comes back; one that is left by `break` is done again by whoever goes on."""
    keeper = MemoryKeeper()
    parts = AloneParts(0, torch.device("cpu"))
    parts.keeper = keeper
    steps = Steps(parts, TOTAL, shuffled(keeper), {}, dict).iterate(Asked())
    for step, _ in steps:
        if step == 4:
            break
    steps.close()
    assert sorted(keeper.saved) == [1, 2, 3]
    again = run(MemoryKeeper(keeper.saved[3]), 2, shuffled)
    assert [step for step, *_ in again] == list(range(4, TOTAL + 1))
