"""One look at a worker: every field of it comes from where it belongs."""

from dataclasses import fields, replace

import pytest

from everstep.launcher.core.memory import Glance
from everstep.launcher.core.monitors import Watched
from everstep.launcher.glances import glance
from everstep.process.kernel import Status
from everstep.process.monitor import Monitoring, Section
from everstep.process.page import Phase, Reading

PAGE = Reading(
    step=7, mark_s=101.0, auto_s=99.0, phase=Phase.DECLARED, limit_s=30.0, generation=2, started_s=90.0, from_step=5,
    name="evaluation", moved_s=102.0, pinged=True, undeclared=True, turns=11, turned_s=100.5, places=3,
)  # fmt: skip
STAT = Status(state="R", parent=1, session=1, cpu_s=4.5, start=17)
SAID = Monitoring(
    generation=2, pid=9, started_s=80.0, beats=4, beat_s=98.0, initial_s=30.0, subsequent_s=3.0, outside_s=97.0,
    outside_limit_s=6.0, events=5, event_s=98.5, signal=40, sections=(Section("save", 98.5, 60.0),),
)  # fmt: skip
WATCHED = Watched(80.0, 4, 98.0, 30.0, 3.0, 97.0, 6.0, 5, (("save", 98.5, 60.0),))
ANSWER = {"asked_s": 103.0, "heard_s": 104.0, "waiting": True, "stack": "in wait", "inside": True}


def test_every_field_comes_from_where_it_belongs():
    seen = glance(3, PAGE, STAT, **ANSWER, monitoring=SAID, deaf=True)
    assert seen == Glance(
        rank=3, generation=2, step=7, from_step=5, phase="declared", mark_s=98.5, moved_s=102.0, state="R", cpu_s=4.5,
        pinged=True, limit_s=30.0, name="evaluation", asked_s=103.0, heard_s=104.0, waiting=True, stack="in wait",
        undeclared=True, turns=11, turned_s=100.5, inside=True, places=3,
        watched=WATCHED, deaf=True,
    )  # fmt: skip
    blank = Glance(0, 0, 0, 0, "", 0.0, 0.0, "", 0.0)
    same = [f.name for f in fields(Glance) if getattr(seen, f.name) == getattr(blank, f.name)]
    assert same == [], "each field is told apart from its default"


@pytest.mark.parametrize(
    ("stat", "held", "state", "cpu_s"),
    [
        (None, False, "Z", 0.0),
        (None, True, "Z", 0.0),
        ("S", False, "S", 4.5),
        ("S", True, "S", 4.5),
        ("t", False, "t", 4.5),
        ("t", True, "S", 4.5),  # by a debugger of ours
        ("T", True, "T", 4.5),  # by somebody else
        ("Z", True, "Z", 4.5),
    ],
)
def test_what_the_kernel_says(stat, held, state, cpu_s):
    told = None if stat is None else Status(state=stat, parent=1, session=1, cpu_s=4.5, start=17)
    seen = glance(0, PAGE, told, held=held, **ANSWER)
    assert (seen.state, seen.cpu_s) == (state, cpu_s)


@pytest.mark.parametrize(
    ("phase", "word"), [(n, Phase.WORDS[n]) for n in range(len(Phase.NAMES))] + [(99, "none"), (-1, "none")]
)
def test_a_phase_that_nobody_knows_is_none(phase, word):
    """A page is the user's process's to write."""
    reading = Reading(step=0, mark_s=0.0, auto_s=0.0, phase=phase, limit_s=0.0, generation=0, started_s=0.0)
    assert glance(0, reading, STAT, **ANSWER).phase == word


def test_what_a_monitor_has_said_belongs_to_its_generation():
    assert glance(3, PAGE, STAT, **ANSWER, monitoring=replace(SAID, generation=1), deaf=True).watched is None
    assert glance(3, PAGE, STAT, **ANSWER, monitoring=replace(SAID, generation=1), deaf=True).mark_s == 101.0
    assert glance(3, PAGE, STAT, **ANSWER, monitoring=SAID).mark_s == 101.0, "a wrapped function has marks of its own"
