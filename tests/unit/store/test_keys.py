"""Which keys belong to a generation that is over; whatever is not ours never does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.store import keys

numbers = st.integers(0, 300)


@given(numbers, numbers, numbers, numbers, st.text())
def test_what_is_below_a_place_is_past_with_its_generation(epoch, generation, present, now, rest):
    key = f"{keys.place(epoch, generation)}/{rest}"
    assert keys.past(key, present, now) == ((epoch, generation) < (present, now))


@pytest.mark.parametrize(
    "key",
    ["", "everstep", "everstep/0", "everstep/roster/0", "everstep/hub/none/0/0", "0/3/default_pg/0", "3",
     "/everstep/0/3", "everstep/0/", "everstep/0/x3/y", "everstep/-1/3/y", "everstep/²/3/y", "epoch/0/3",
     "everstep2/0/3/y"],
)  # fmt: skip
def test_what_is_not_below_a_place_of_ours_is_never_past(key):
    assert not keys.past(key, 1000, 1000)
