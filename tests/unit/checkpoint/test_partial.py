"""A restore takes all or nothing; with `restore_what_fits` it takes what fits, and lists the rest (CL-11)."""

import copy

import pytest
import torch
from torch import nn

from everstep.checkpoint.walk import StateWalk
from everstep.errors import DamagedCheckpoint, StateMismatch


class Box:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Picky(Box):
    """Refuses what it does not like, half-way."""

    def load_state_dict(self, state):
        self.value = "half"
        if state["value"] == "bad":
            raise ValueError("not this one")
        self.value = state["value"]


class Model(nn.Module):
    def __init__(self, wide=3, names=("a", "b")):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, wide))
        self.tail = nn.Linear(2, 2)
        self.seen = 0

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        if state == "bad":
            raise RuntimeError("an extra state that is refused")
        self.seen = state


def state(seed, **more):
    torch.manual_seed(seed)
    model = more.pop("model", None) or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 10)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seed)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "box": Box(seed)} | more


def frozen(given):
    model, optimizer = given["model"], given["optimizer"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    found |= {f"{names[p]}:{k}": v.clone() for p, entry in optimizer.state.items() for k, v in entry.items()}
    return (
        found,
        copy.deepcopy({name: thing.value for name, thing in given.items() if isinstance(thing, Box)}),
        model.seen,
    )


def same(one, other):
    tensors, values, seen = one
    assert tensors.keys() == other[0].keys()
    assert all(value.equal(other[0][name]) for name, value in tensors.items())
    assert (values, seen) == other[1:]


def taken(kept, given):
    return StateWalk(given).restore_what_fits(kept.layout, kept.payload)


def test_where_all_fits_it_is_a_strict_restore(keep):
    saved, live = state(1), state(2)
    kept = keep(saved)
    partial = taken(kept, live)
    assert partial.whole
    assert str(partial) == "all of it was taken"
    same(frozen(live), frozen(saved))
    assert partial.bytes == StateWalk(state(3)).restore(kept.layout, kept.payload) - sum(
        leaf.nbytes for leaf in kept.layout.section("rng").leaves
    )


def test_what_is_missing_left_over_or_of_another_shape_is_listed_and_left_as_it_was(keep):
    saved = state(1, extra=Box(7))
    kept = keep(saved)
    torch.manual_seed(2)
    live = state(2, model=Model(names=("a", "new")), late=Box(9))
    with torch.no_grad():
        live["model"].tail = nn.Linear(2, 4)
    live["optimizer"] = torch.optim.AdamW(live["model"].parameters(), lr=0.2)
    before = {name: value.clone() for name, value in live["model"].state_dict().items() if "extra" not in name}
    with pytest.raises(StateMismatch) as told:
        StateWalk(live).restore(kept.layout, kept.payload)
    for name in ("model/new.weight is missing", "model/b.weight was saved", "late is not in", "extra was saved"):
        assert name in str(told.value)
    assert all(value.equal(before[name]) for name, value in live["model"].state_dict().items() if name in before)
    partial = taken(kept, live)
    assert set(partial.missing) == {
        "model/new.weight", "model/new.bias", "optimizer/state/new.weight", "optimizer/state/new.bias", "late",
    }  # fmt: skip
    assert set(partial.left_over) == {
        "model/b.weight", "model/b.bias", "optimizer/state/b.weight", "optimizer/state/b.bias", "extra",
    }  # fmt: skip
    assert any(
        "model/tail.weight was saved as float32[2, 2] and is float32[4, 2]" in text for text in partial.differing
    )
    after = live["model"].state_dict()
    truth = saved["model"].state_dict()
    assert after["a.weight"].equal(truth["a.weight"])
    assert all(after[name].equal(before[name]) for name in before if name.startswith(("new", "tail")))
    assert (live["box"].value, live["late"].value) == (1, 9)
    assert (
        live["optimizer"]
        .state[live["model"].a.weight]["exp_avg"]
        .equal(saved["optimizer"].state[saved["model"].a.weight]["exp_avg"])
    )
    assert live["model"].new.weight not in live["optimizer"].state
    assert "not in the saved state, left as it was: " in str(partial)
    assert "saved, and taken by nothing here: " in str(partial)


def test_an_object_that_is_not_there_any_more_and_other_groups(keep):
    saved = state(1)
    kept = keep(saved)
    live = state(2)
    live["optimizer"] = torch.optim.AdamW(
        [{"params": [*live["model"].a.parameters()]}, {"params": [*live["model"].tail.parameters()]}], lr=0.2
    )
    partial = taken(kept, live)
    assert "optimizer/param_groups: saved with 1 groups, here are 2" in partial.differing
    assert set(partial.left_over) == {"optimizer/state/b.weight", "optimizer/state/b.bias"}
    assert [group["lr"] for group in live["optimizer"].param_groups] == [0.2, 0.2]
    assert (
        live["optimizer"]
        .state[live["model"].a.bias]["exp_avg"]
        .equal(saved["optimizer"].state[saved["model"].a.bias]["exp_avg"])
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_a_groups_numbers_are_never_put_to_other_parameters(keep, swapped):
    def groups(seed, order, lr):
        given = state(seed)
        model = given["model"]
        parts = [{"params": [*model.get_submodule(name).parameters()], "lr": lr * n} for n, name in order]
        return given | {"optimizer": torch.optim.SGD(parts, momentum=0.5)}

    order = [(1, "a"), (2, "b"), (3, "tail")]
    kept = keep(groups(1, order, 0.1))
    live = groups(2, [order[1], order[0], order[2]] if swapped else order, 7.0)
    partial = taken(kept, live)
    numbers = [group["lr"] for group in live["optimizer"].param_groups]
    assert numbers == ([14.0, 7.0, 3 * 0.1] if swapped else [0.1, 0.2, 3 * 0.1])
    told = [
        "optimizer/param_groups/0 was saved of other parameters",
        "optimizer/param_groups/1 was saved of other parameters",
    ]
    assert list(partial.differing) == (told if swapped else [])


def test_a_state_without_an_optimizer_leaves_the_optimizer_alone(keep):
    saved = state(1)
    del saved["optimizer"]
    live = state(2)
    before = frozen(live)
    partial = taken(keep(saved), live)
    assert set(partial.missing) == {"optimizer/state", "optimizer/param_groups"}
    assert all(value.equal(before[0][name]) for name, value in frozen(live)[0].items() if ":" in name)


@pytest.mark.parametrize("strict", [True, False])
def test_an_object_that_refuses_leaves_everything_as_it_was(keep, strict):
    kept = keep(state(1, picky=Picky("bad"), zebra=Box(1)))
    live = state(2, picky=Picky("good"), zebra=Box(2))
    before = frozen(live)
    walk = StateWalk(live)
    with pytest.raises(StateMismatch, match="not this one"):
        (walk.restore if strict else walk.restore_what_fits)(kept.layout, kept.payload)
    same(frozen(live), before)


def test_an_extra_state_that_is_refused_does_too(keep):
    saved = state(1)
    saved["model"].seen = "bad"
    kept, live = keep(saved), state(2)
    before = frozen(live)
    with pytest.raises(RuntimeError, match="an extra state that is refused"):
        StateWalk(live).restore(kept.layout, kept.payload)
    same(frozen(live), before)


def test_bytes_that_cannot_be_read_are_met_before_the_models_are_written(keep):
    """`State.prepare` reads all of it first; whatever comes later is met at the first object all the same."""
    kept, live = keep(state(1)), state(2)
    before = frozen(live)

    def payload(leaf):
        raise DamagedCheckpoint(f"{leaf.path}: changed")

    with pytest.raises(DamagedCheckpoint):
        StateWalk(live).restore(kept.layout, payload)
    same(frozen(live), before)


def test_an_undo_that_is_refused_is_a_note_of_the_first_error(keep):
    class Never(Box):
        def load_state_dict(self, state):
            raise ValueError(f"never {state['value']}")

    kept, live = keep(state(1, never=Never(1))), state(2, never=Never(2))
    with pytest.raises(StateMismatch, match="never 1") as told:
        StateWalk(live).restore(kept.layout, kept.payload)
    assert any("never 2" in note for note in told.value.__notes__)


def test_an_optimizer_saved_before_its_first_step_comes_back_empty(keep):
    """CL-09, also where only what fits is taken."""
    torch.manual_seed(0)
    model = Model()
    kept = keep({"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "box": Box(1)})
    for strict in (True, False):
        live = state(2)
        walk = StateWalk(live)
        (walk.restore if strict else walk.restore_what_fits)(kept.layout, kept.payload)
        assert live["optimizer"].state == {}
