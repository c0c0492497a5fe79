"""The simulated worlds of the control-plane benchmark run the product's machine, and their rosters stay small."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import ProtocolError
from everstep.experiments.core import simulated, wire
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.recovery.core.world import Phase

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
incarnations = st.builds(
    Incarnation, st.sampled_from(["b0", "b1", "b.2"]), st.integers(1, 1 << 22), st.integers(0, 1 << 40)
)
members = st.lists(
    st.tuples(
        incarnations,
        names,
        st.integers(0, 99),
        st.booleans(),
        st.sampled_from(["kept", "spare", "started"]),
    ),
    max_size=20,
).map(lambda rows: tuple(Member(rank, *rest) for rank, rest in enumerate(rows)))


@given(
    st.builds(
        Roster, st.integers(0, 9), st.integers(0, 99), members, st.lists(incarnations, max_size=3).map(tuple), names,
        names,
    )
)  # fmt: skip
def test_an_assignment_comes_out_of_the_wire_as_it_went_in(roster):
    assert wire.unpack(wire.pack(roster)) == roster


@pytest.mark.parametrize("ranks", [64, 256, 1024, 4096])
def test_an_assignment_takes_at_most_40_bytes_a_rank_and_fits_a_value(ranks):
    size = len(wire.pack(simulated.first_roster(ranks, 8)))  # the largest: every rank is said to be new
    plain = Roster(0, 1, tuple(Member(m.rank, m.incarnation, m.node, m.slot, False, "kept")
                               for m in simulated.first_roster(ranks, 8).members))  # fmt: skip
    assert len(wire.pack(plain)) <= 40 * ranks
    assert size <= 1 << 20


@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (64, 8), (20, 8), (7, 1)])
def test_generation_after_generation_one_rank_is_replaced_and_all_others_kept(ranks, per_node):
    view, roster = None, simulated.first_roster(ranks, per_node)
    view = simulated.running(roster)
    slot = min(per_node, ranks) - 1
    for life in range(3):
        dead, standby = (simulated.incarnation(0, slot, life + n) for n in (0, 1))
        arrivals = [[(m.incarnation, simulated.facts(0, m.slot))] for m in roster.members if m.incarnation != dead]
        random.Random(life).shuffle(arrivals)
        view, following = simulated.gathered(simulated.struck(view, dead, standby), arrivals)
        view = simulated.entered(view, wire.unpack(wire.pack(following)))
        assert (view.phase, view.roster) == (Phase.RUNNING, following)
        changed = [
            m.rank for m, old in zip(following.members, roster.members, strict=True) if m.incarnation != old.incarnation
        ]
        assert changed == [slot]  # fmt: skip
        assert following.members[slot].incarnation == standby
        assert {m.why for m in following.members if m.rank != slot} <= {"kept"}
        roster = following


def test_arrivals_that_are_missing_are_told():
    view = simulated.struck(
        simulated.running(simulated.first_roster(8, 8)), simulated.incarnation(0, 7), simulated.incarnation(0, 7, 1)
    )
    with pytest.raises(ProtocolError, match="not complete"):
        simulated.gathered(view, [])
