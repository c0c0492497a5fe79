"""Whether restarts still lead anywhere."""

import pytest

from everstep.fault_tolerance.core.progress import Track, begun, ended


@pytest.mark.parametrize(
    ("first", "seen", "ends_at"),
    [
        (None, [None] * 9, None),  # nothing is known, nothing is counted
        (None, [0, 0, 0], 3),
        (0, [0, 0, 0], 3),
        (100, [100, 100, 100], 3),  # taken up at 100
        (100, [200, 200, 200, 200], 4),
        (0, [10, 10, 10, 20, 20, 20, 20], 7),  # progress begins the count anew
        (0, [10, None, 10, None, 10, 10], 6),  # a file that cannot be read is not counted
        (0, [1, 2, 3, 4, 5, 6], None),
        (500, [400, 400, 400], 3),  # an older checkpoint is no progress
    ],
)
def test_three_starts_in_a_row_without_progress_end_the_job(first, seen, ends_at):
    track = begun(Track(), first)
    for number, iteration in enumerate(seen, 1):
        track, why = ended(track, iteration)
        assert (why is not None) == (number == ends_at), number
        if why is not None:
            assert f"3 starts in a row made no progress: iteration {iteration} " in why
            return


def test_less_than_what_is_expected_is_none():
    track = begun(Track(least=10, most=2), 0)
    track, why = ended(track, 9)
    assert why is None
    _, why = ended(track, 18)
    assert why is not None
    assert "10 more are expected" in why


@pytest.mark.parametrize("most", [0, -1])
def test_it_can_be_turned_off(most):
    track = begun(Track(most=most), 0)
    for _ in range(9):
        track, why = ended(track, 0)
        assert why is None
