"""Fragments between nodes: whole or not at all."""

import random

import pytest

from everstep.checkpoint.core.parcels import PART, Parcels, cut


def content(size, seed=0):
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART + 7])
def test_what_is_cut_comes_together_again(size):
    parcels = Parcels()
    parts = list(cut(content(size)))
    assert all(len(part["text"]) < 100_000 for part in parts)
    taken = [parcels.take("key", part) for part in parts]
    assert taken[:-1] == [None] * (len(parts) - 1)
    assert taken[-1] == content(size)


def test_two_that_come_at_once_are_kept_apart():
    parcels = Parcels()
    one, other = list(cut(content(3 * PART, 1))), list(cut(content(3 * PART, 2)))
    taken = [
        parcels.take(key, part) for pair in zip(one, other, strict=True) for key, part in zip("ab", pair, strict=True)
    ]
    assert taken[-2:] == [content(3 * PART, 1), content(3 * PART, 2)]


@pytest.mark.parametrize(
    "harm",
    [
        {"part": 2}, {"of": 10**9}, {"of": 0}, {"text": "$$$"}, {"xxh3": "0" * 16}, {"part": -1}, {"text": "AAAA"},
    ],
)  # fmt: skip
def test_what_is_spoiled_is_nothing(harm):
    parcels = Parcels()
    parts = list(cut(content(2 * PART - 100)))
    parts[1] = {**parts[1], **harm}
    assert [parcels.take("key", part) for part in parts] == [None, None]
    assert [parcels.take("key", part) for part in cut(b"next")] == [b"next"]


def test_a_part_that_is_missing_spoils_the_whole():
    parcels = Parcels()
    first, _, third = cut(content(3 * PART - 100))
    assert parcels.take("key", first) is None
    assert parcels.take("key", third) is None
