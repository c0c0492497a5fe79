"""Clocks: monotonic within a boot, wall offsets between boots, jumps change nothing."""

import pytest

from everstep.events import Notice, Record, Stamp
from everstep.goodput.core.axis import Axis, to_ns, to_s


def record(mono, wall, boot="a"):
    return Record(Stamp(mono_s=mono, wall_s=wall, boot_id=boot, pid=1, role="agent"), Notice(text=""))


def test_within_one_boot_a_wall_clock_that_jumps_moves_nothing():
    axis = Axis.of([record(1, 101), record(2, 102), record(3, 103), record(4, 3704), record(5, 105)])
    gaps = [axis.moment(b, "a") - axis.moment(a, "a") for a, b in ((1, 2), (3, 4), (4, 5))]
    assert gaps == [to_ns(1)] * 3
    assert axis.moment(1, "a") == to_ns(101)
    assert axis.bound_s == 0


def test_boots_are_joined_by_their_offsets_and_the_bound_is_told():
    axis = Axis.of([record(1, 101), record(2, 102.25), record(900, 101.0, "b"), record(901, 102.0, "b")])
    assert to_s(axis.moment(901, "b") - axis.moment(1, "a")) == pytest.approx(1.0, abs=0.3)
    assert axis.bound_s == pytest.approx(0.25)
