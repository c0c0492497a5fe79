"""What makes a run's losses incomparable is named: once each, and nothing else is."""

from dataclasses import replace

import pytest

from everstep.events import Numerics, Record, Stamp
from everstep.goodput.core.accounting import account
from everstep.goodput.core.comparable import MOST_TOLD, Comparison, differences, verdict
from everstep.testing.simulated_run import SimulatedRun

FACTS = {"threads": "8", "processor": "A"}


def begun(*ranks, node="n0", facts=FACTS, world=4, into=None):
    comparison = into or Comparison()
    told = [text for rank in ranks for text in comparison.hear(rank, world, node, facts)]
    return comparison, told


def test_a_world_that_is_what_it_was_is_comparable_however_often_it_begins_again():
    comparison, told = begun(0, 1, 2, 3)
    for _ in range(5):
        told += begun(3, 1, 2, 0, into=comparison)[1]
    assert told == []
    assert verdict(told) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"facts": FACTS | {"threads": "4"}}, "rank 2: threads 4, and 8 when the run began"),
        ({"facts": {"threads": "8"}}, "rank 2: processor unknown, and A when the run began"),
        ({"facts": FACTS | {"device": "B"}}, "rank 2: device B, and unknown when the run began"),
        ({"node": "n1"}, "rank 2 is on another node than when the run began"),
        ({"world": 3}, "the world has 3 ranks, and had 4 when the run began"),
    ],
)
def test_what_has_changed_is_named_once(changed, said):
    comparison, _ = begun(0, 1, 2, 3)
    assert begun(2, into=comparison, **changed)[1] == [said]
    assert begun(2, into=comparison, **changed)[1] == []
    assert said in verdict([said])


def test_ranks_that_are_unlike_each_other_are_named():
    comparison, _ = begun(0)
    said = begun(1, into=comparison, facts=FACTS | {"threads": "2"})[1]
    assert said == ["ranks are unlike: threads 2 on rank 1, 8 on rank 0"]


def test_a_world_that_comes_back_to_its_size_is_compared_with_its_beginning():
    comparison, _ = begun(0, 1, 2)
    assert begun(0, 1, 2, world=3, into=comparison)[1] != []
    assert begun(0, 1, 2, 3, into=comparison)[1] == []
    assert begun(3, facts=FACTS | {"threads": "1"}, into=comparison)[1] == [
        "rank 3: threads 1, and 8 when the run began"
    ]


def test_thousands_of_changes_are_not_all_kept():
    comparison, _ = begun(0)
    for n in range(3 * MOST_TOLD):
        begun(0, into=comparison, facts=FACTS | {"threads": str(n)})
    assert len(comparison._told) == MOST_TOLD


def recorded(rank, generation, facts, boot="b", at=1.0):
    stamp = Stamp(mono_s=at, wall_s=at, boot_id=boot, pid=9, role="worker", slot=rank, rank=rank, generation=generation)
    return Record(stamp, Numerics(world_size=2, facts=facts))


def test_the_records_of_a_run_say_it_and_the_wire_form_keeps_it():
    records = [recorded(0, 0, FACTS), recorded(1, 0, FACTS), recorded(1, 1, FACTS | {"threads": "1"})]
    again = [Record.from_json(record.to_json()) for record in records]
    assert differences(again) == differences(records) == ["rank 1: threads 1, and 8 when the run began"]
    assert differences([*records[:2], recorded(1, 1, FACTS, boot="c")]) == [
        "rank 1 is on another node than when the run began"
    ]


def test_a_report_says_it():
    run = SimulatedRun(ranks=2, steps=5).run()
    assert account(run).not_comparable == []
    last = max(r.stamp.mono_s for r in run)
    stamps = [replace(r.stamp, mono_s=last) for r in run if r.stamp.role == "worker"][:1]
    added = [Record(s, Numerics(world_size=2, facts={"threads": t})) for s in stamps for t in ("1", "2")]
    assert len(account([*run, *added]).not_comparable) == 1
