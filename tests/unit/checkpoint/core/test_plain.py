"""A plain value's JSON is believed where it is proven, and is then what the long way prints."""

import collections
import enum
import json
import math
import random

import numpy as np
import pytest

from everstep.checkpoint.core.layout import decode, printed
from everstep.checkpoint.core.plain import plain


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


class Money(float):
    pass


class Loud:
    def __buffer__(self, flags):
        raise AssertionError


PLAIN = [
    None, True, False, 0, -1, 2**990, 0.0, -0.0, 1.0, 1e-320, 0.1, "", "é\ud800\x00\"\\", "[" * 200, "1" * 250,
    [], {}, [[]], {"a": 1, "b": [1.5, None, {"c": ""}]}, {"": 0}, {"1": 1}, list(range(3000)), ["!"], '"!":',
]  # fmt: skip
OTHERS = [
    (), (1,), [(1,)], {1: 2}, {True: 1}, {None: 1}, {1.5: 1}, {(1,): 1}, {"!": 1}, {"a": {"!": 1}}, math.nan, math.inf,
    -math.inf, [math.nan], 2**1100, -(2**2000), 10**5000, 1j, b"", b"a", bytearray(b"a"), memoryview(b"a"), set(), {1},
    frozenset(), Colour.RED, Name("a"), Money(1), {Name("a"): 1}, np.float64(1), np.int64(1), np.bool_(True),
    np.str_("a"), np.ones(1), [np.float64(1)], collections.OrderedDict(a=1), collections.Counter("a"), {"1": 1, 1: 1},
    collections.deque([1]), collections.defaultdict(list), range(3), "\ud800\udc00",
    Ellipsis, StopIteration, object(), Loud(), print, (lambda: 0).__code__,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_what_json_has_exactly_is_printed_as_by_the_long_way(value):
    made = plain(value)
    assert made is not None
    assert made.text == printed(value)
    back = decode(json.loads(made.text))
    assert repr(back) == repr(value) == repr(made.value)
    assert plain(value, made) is made


@pytest.mark.parametrize("value", OTHERS, ids=lambda v: type(v).__name__)
def test_what_json_has_not_exactly_is_left_to_the_long_way(value):
    assert plain(value) is None
    assert plain([{"deep": value}]) is None


def test_no_two_values_are_taken_for_one():
    made = {n: plain(value) for n, value in enumerate(PLAIN)}
    for n, known in made.items():
        for other in [*PLAIN[:n], *PLAIN[n + 1 :], *OTHERS]:
            assert plain(other, known) is not known


def test_what_contains_itself_or_is_nested_too_deep_is_left_to_the_long_way():
    loop: list = []
    loop.append(loop)
    assert plain(loop) is None
    deep: list = []
    for depth in range(99, 103):
        deep = [1]
        for _ in range(depth - 1):
            deep = [deep] if depth % 2 else {"a": deep}
        made = plain(deep)
        try:
            text = printed(deep)
        except TypeError:
            text = None
        assert (made and made.text) == text
    for _ in range(100_000):
        deep = [deep]
    assert plain(deep) is None


def test_what_goes_on_is_a_copy():
    value = {"a": [1, {"b": 2}]}
    made = plain(value)
    value["a"][1]["b"] = 3
    assert made.value == {"a": [1, {"b": 2}]}


def grown(rng: random.Random, depth: int):
    kind = rng.randrange(9 if depth else 6)
    if kind == 6:
        return [grown(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice("abc!"): grown(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 8:
        return rng.choice(OTHERS[:-6])
    return [
        None,
        rng.random() < 0.5,
        rng.randrange(-5, 5),
        rng.choice([0.0, -0.0, 0.5, 1.0]),
        rng.choice(["", "a"]),
        1,
    ][kind]


def test_of_thousands_of_values_all_that_is_believed_is_right():
    rng = random.Random(1)
    believed = 0
    for _ in range(4000):
        value = grown(rng, 4)
        made = plain(value)
        if made is not None:
            believed += 1
            assert made.text == printed(value)
            assert repr(made.value) == repr(value)
    assert believed > 1000
