"""A value with tensors is read anew unless all of it but bytes is as it was; then nothing of it is read again."""

import random
from collections import OrderedDict

import pytest
import torch
from torch import nn

from everstep.checkpoint.outline import Outline
from everstep.checkpoint.tensors import Reading
from everstep.checkpoint.walk import StateWalk


def value():
    shadow = torch.arange(12.0)
    return {
        "a": torch.zeros(3, 4),
        "list": [torch.ones(2, dtype=torch.bfloat16), 1, 2.5, "word", None, True],
        "tuple": (nn.Parameter(torch.ones(3)), {"deep": [shadow, shadow[:3]]}),
        "ordered": OrderedDict(x=torch.zeros(0), y=1j),
        7: -0.0,
    }


def again(given):
    """The same tensors in new containers, as a `state_dict()` returns them."""
    if type(given) is dict:
        return {key: again(child) for key, child in given.items()}
    if type(given) is OrderedDict:
        return OrderedDict((key, again(child)) for key, child in given.items())
    if type(given) in (list, tuple):
        return type(given)(again(child) for child in given)
    return given.detach() if isinstance(given, torch.Tensor) and type(given) is torch.Tensor else given


def test_what_stayed_is_not_read_again_whatever_its_bytes_are():
    reading, given = Reading("v"), value()
    given.pop("ordered")  # an empty tensor has no memory by which it could be known
    first = reading.part(given)
    given["a"].add_(1)
    assert reading.part(given) is first
    assert reading.part(again(given)) is first


def swap(v):
    v["a"] = torch.zeros(3, 4)


def data(v):
    v["a"].data = torch.zeros(3, 4)


def shape(v):
    v["a"] = v["a"].view(4, 3)


def dtype(v):
    v["a"] = v["a"].view(torch.int32)


def offset(v):
    v["tuple"][1]["deep"][1] = v["tuple"][1]["deep"][0][1:4]


def resized(v):
    v["a"].resize_(2, 4)


def negated(v):
    v["a"] = torch.view_as_complex(torch.zeros(3, 4, 2)).conj().imag


def order(v):
    v["a"] = v.pop("a")


def key(v):
    v[True] = v.pop(7)


def added(v):
    v["list"].append(0)


def removed(v):
    v["list"].pop()


def number(v):
    v["list"][1] = 3


def kind_of_number(v):
    v["list"][1] = 1.0


def boolean(v):
    v["list"][1] = True


def zero(v):
    v[7] = 0.0


def kind_of_container(v):
    v["list"] = tuple(v["list"])


def to_plain_dict(v):
    v["ordered"] = dict(v["ordered"])


def exchanged(v):
    v["a"], v["b"] = torch.zeros(3, 4), v["a"]


CHANGES = [swap, data, shape, dtype, offset, resized, negated, order, key, added, removed, number, kind_of_number,
           boolean, zero, kind_of_container, to_plain_dict, exchanged]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_but_of_bytes_is_seen(change):
    given = value()
    given["ordered"]["x"] = torch.zeros(1)
    reading = Reading("v")
    first = reading.part(given)
    assert reading.part(given) is first
    change(given)
    found, expected = reading.part(given), Reading("v").part(given)
    assert found is not first
    assert found.section == expected.section
    assert all(a.is_set_to(b) or a.is_neg() for a, b in zip(found.sources, expected.sources, strict=True))


@pytest.mark.parametrize("odd", [{1, 2}, torch.zeros(2).numpy(), bytearray(3), object(), torch.zeros(2).to_sparse()])
def test_what_is_not_plain_has_no_outline(odd):
    assert Outline.of({"t": torch.zeros(2), "odd": odd}) is None
    assert Outline.of({"only": "values"}) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_that_uses_it_again_describes_the_state_as_one_that_does_not(seed):
    rng = random.Random(seed)
    state = {"one": value(), "epoch": 0, "two": [torch.zeros(5), {"n": 1}], "three": {"grows": [torch.zeros(2)]}}
    kept = StateWalk(state, values=True)
    for step in range(12):
        if rng.random() < 0.5:
            rng.choice([swap, offset, number, kind_of_number, boolean, zero, negated])(state["one"])
        state["epoch"] = step
        if rng.random() < 0.3:
            state["three"]["grows"].append(torch.full((rng.randrange(1, 9),), float(step)))
        state["two"][0].add_(1)
        layout, parts = kept.collect()
        fresh_layout, fresh_parts = StateWalk(state, values=True).collect()
        assert layout == fresh_layout
        assert kept.encode(layout) == fresh_layout.to_json()
        for part, other in zip(parts, fresh_parts, strict=True):
            assert all(a.equal(b) for a, b in zip(part.sources, other.sources, strict=True))
