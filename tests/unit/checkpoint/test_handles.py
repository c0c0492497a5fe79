"""The book of fates: every handle has one in the end, in whatever order saves and fates come."""

import pytest

from everstep.checkpoint.handles import Book
from everstep.errors import CheckpointError


def fates(*handles):
    return [handle.fate and (handle.fate.what, handle.fate.into) for handle in handles]


@pytest.fixture
def book():
    return Book(lambda: "")


def test_a_later_fate_is_that_of_what_was_left_out_for_it(book):
    first, second, third = (book.open(number, 10 * number) for number in (1, 2, 3))
    book.settle(2, 20, "committed", "", alone=False)
    assert fates(first, second, third) == [("coalesced", 20), ("committed", None), None]


def test_what_is_decided_before_this_rank_has_come_to_it_is_the_fate_of_its_save(book):
    """Another rank was ahead, and its save was left out, or could not be made: nobody says so again."""
    book.settle(1, 10, "skipped", "another was being written", alone=True)
    book.settle(4, 40, "failed", "no room", alone=False)
    first, second, fourth = (book.open(number, 10 * number) for number in (1, 2, 4))
    assert fates(first, second, fourth) == [("skipped", None), ("failed", None), ("failed", None)]
    assert second.fate.text == "left out for step 40, which was not saved: no room"
    with pytest.raises(CheckpointError, match="no room"):
        fourth.wait(0)
    fifth = book.open(5, 50)
    assert fates(fifth) == [None]


def test_a_number_that_was_decided_alone_decides_none_before_it(book):
    book.settle(3, 30, "skipped", "", alone=True)
    first, third = book.open(1, 10), book.open(3, 30)
    assert fates(first, third) == [None, ("skipped", None)]
