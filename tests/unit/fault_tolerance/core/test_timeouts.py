"""Calculated timeouts: NVRx's answers to random heartbeats and sections, and ours. Times are numbers."""

import json
from pathlib import Path

import pytest

from everstep.fault_tolerance.core.timeouts import HeartbeatTimeouts, SectionTimeouts, Seen

RUNS = json.loads((Path(__file__).parents[1] / "nvrx/timeouts.json").read_text())["timeouts"]
SECTIONS = ("load", "step", "save")


def told_of(timeouts):
    if isinstance(timeouts, HeartbeatTimeouts):
        return [timeouts.initial, timeouts.subsequent, timeouts.were_calculated]
    return [dict(timeouts.section), timeouts.out_of_section, sorted(timeouts.calculated_sections),
            timeouts.is_out_of_section_calculated]  # fmt: skip


class Played:
    """One run of the table."""

    def __init__(self, factor: float) -> None:
        self.factor, self.seen = factor, Seen(SECTIONS, 0.0)
        self.beats = HeartbeatTimeouts(3600.0, 2700.0, were_calculated=False)
        self.sections = SectionTimeouts({"load": 60.0, "step": 5.0, "save": None}, 9.0)

    def say(self, what: str, name: str | None, now: float) -> None:
        if what == "beat":
            self.seen.beat(now)
        elif what == "open":
            self.seen.opened(name, now)
        else:
            for each in [name] if what == "close" else list(self.seen.open):
                self.seen.closed(each, now)

    def heartbeats(self):
        if self.seen.lacking():
            return None
        self.beats = self.seen.heartbeats(self.factor, self.beats)
        return told_of(self.beats)

    def calculated(self, chosen, outside, now):
        selected = list(SECTIONS) if chosen is None else chosen
        self.seen.look_outside(now)
        if self.seen.lacking(selected, outside=outside):
            return None
        self.sections = self.seen.timeouts(self.factor, selected, self.sections, outside=outside)
        return told_of(self.sections)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_timeouts_are_those_that_nvrx_calculates(number):
    run, answers = RUNS[number], []
    played = Played(run["factor"])
    for what, argument, now in run["events"]:
        if what == "heartbeats":
            answers.append(played.heartbeats())
        elif what == "sections":
            answers.append(played.calculated(*argument, now))
        else:
            played.say(what, argument, now)
    assert json.loads(json.dumps(answers)) == run["answers"]


def test_what_was_under_way_when_a_fault_came_is_no_interval():
    seen = Seen(("step",), 0.0)
    seen.beat(1.0)
    seen.opened("step", 1.0)
    seen.begin(100.0)
    assert (seen.beats, seen.open) == (0, {})
    seen.beat(101.5)
    seen.opened("step", 101.5)
    seen.closed("step", 103.5)
    assert seen.initial_s == 1.5
    assert seen.sections_s == {"step": 2.0}
    assert seen.outside_s == 1.5


def test_what_is_lacking_is_named():
    seen = Seen(("step", "save"), 0.0)
    assert seen.lacking() == ["a first heartbeat", "a second heartbeat"]
    seen.beat(1.0)
    assert seen.lacking() == ["a second heartbeat"]
    seen.opened("step", 1.0)
    seen.closed("step", 2.0)
    assert seen.lacking(["step", "save"], outside=True) == ["section 'save'"]


def test_the_most_of_all_ranks_is_what_each_goes_on_with():
    here, there = Seen(("step",), 0.0), Seen(("step",), 0.0)
    for seen, long in ((here, 1.0), (there, 4.0)):
        seen.beat(long)
        seen.beat(long + 0.5)
    most = [max(pair) for pair in zip(here.give(), there.give(), strict=True)]
    here.take(most)
    there.take(most)
    assert here.give() == there.give() == [4.0, 0.5, -1.0, -1.0]
