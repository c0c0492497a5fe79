"""The agent's eyes over a page in memory: what is asked, and what the ledger is told. Time is a number."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from everstep.events import LimitLearned, Notice
from everstep.launcher.agent.watch import INTERVAL_S, Watch
from everstep.launcher.agent.worker import Worker
from everstep.launcher.core.limits import Own
from everstep.process.page import Page

_IDLE = 1  # a process that sleeps: what the kernel says of it is real
STACK = '  File "/home/u/train.py", line 9, in wait\n    child.wait()\n'


class Eyes:
    """A watch and one rank whose page the test writes."""

    def __init__(self, own: Own | None = None) -> None:
        fd = Page.create("watched")
        self.asked: list[dict] = []
        process = SimpleNamespace(pid=_IDLE, send=self.asked.append)
        self.worker = Worker(process, fd, Page(fd), 0)
        self.watch, self.now, self.verdicts, self.news = Watch(own or Own()), 100.0, [], []
        self.worker.page.enter(0, self.now)
        self.step = 0

    def looks(self, seconds: float, *, steps_s: float = 0.0, moves: bool = False) -> None:
        """Look five times a second; a step is done every `steps_s`."""
        until = self.now + seconds
        while self.now < until:
            self.now += INTERVAL_S
            if steps_s and self.now - self.worker.look().mark_s >= steps_s - 0.01:
                self.step += 1
                self.worker.page.step_done(self.step, self.now)
            if moves or steps_s:
                self.worker.page.moved(self.now)
            if self.worker.probe_sent is not None:
                self.worker.probe_sent, self.worker.heard_s = None, self.now
                self.worker.waiting, self.worker.stack = False, STACK
            self.verdicts += self.watch.look({0: self.worker}, self.now)
            self.news += self.watch.news()

    def told(self, kind: type = LimitLearned) -> list:
        return [event for event in self.news if isinstance(event, kind)]


@pytest.fixture
def eyes():
    made: list[Eyes] = []

    def make(own: Own | None = None) -> Eyes:
        made.append(Eyes(own))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()


def test_what_is_learned_is_told_with_what_it_was_learned_from(eyes):
    one = eyes()
    one.looks(1.0, steps_s=0.2)
    one.looks(60.0, steps_s=0.4)
    assert one.verdicts == []
    (first,) = one.told()
    assert (first.idle_s, first.place) == (5.0, "")
    assert first.step_s == pytest.approx(0.2, abs=0.05)
    assert "nine of ten" in first.text
    one.looks(200.0, steps_s=4.0)
    assert one.told()[-1].idle_s == pytest.approx(24.0, abs=1.5)
    assert one.told()[-1].longest_s == pytest.approx(4.0, abs=0.3)
    assert len(one.told()) < 12, "not each step is worth a line"


def test_an_alarm_is_raised_once_and_the_raised_limit_is_told(eyes):
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    one.looks(6.0)
    assert [(v.rank, v.action) for v in one.verdicts][:1] == [(0, "interrupt")]
    assert [message["kind"] for message in one.asked] == ["world.probe"]
    told = one.told()[-1]
    assert (told.place, told.place_s) == ("/home/u/train.py:9 in wait", 50.0)
    assert "is raised from 5 s to 50 s" in told.text


def test_a_silence_that_ends_by_itself_is_told_with_its_place(eyes):
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    one.looks(4.0)
    one.looks(1.0, steps_s=0.2)
    assert one.verdicts == []
    told = one.told()[-1]
    assert told.place == "/home/u/train.py:9 in wait"
    assert told.place_s == pytest.approx(8.4, abs=0.6)
    assert "has ended by itself" in told.text


def test_the_interpreter_s_own_sign_voids_what_was_asked(eyes):
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    for _ in range(4):
        one.looks(3.0)
        assert one.worker.heard_s is not None
        one.looks(0.4, moves=True)
        assert one.worker.heard_s is None
    assert one.verdicts == []
    assert len(one.asked) == 4


def test_near_its_limit_is_who_has_used_most_of_it(eyes):
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    one.looks(2.8)
    assert one.watch.near == frozenset()
    one.looks(1.0)
    assert one.watch.near == frozenset({0})
    one.looks(1.0, moves=True)
    assert one.watch.near == frozenset()


def test_a_limit_of_the_operator_s_that_steps_come_close_to_is_warned_about_once(eyes):
    one = eyes(Own(soft_s=6.0))
    one.looks(30.0, steps_s=4.0)
    (warning,) = one.told(Notice)
    assert warning.level == "warning"
    assert "--soft-timeout 6: the longest step so far took 4." in warning.text
    assert all(event.idle_s == 6.0 for event in one.told())


def test_a_gap_in_our_own_looks_is_no_silence(eyes):
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    for _ in range(3):
        one.now += 30.0
        one.looks(0.4)
    one.looks(1.0, steps_s=0.2)
    assert one.verdicts == []
    assert one.watch.memory.learned.longest_s < 6.0


def test_turns_are_the_steps_of_who_declares_none(eyes):
    one = eyes()
    one.worker.page.undeclared(one.now)
    one.looks(2.0)
    assert one.verdicts == []
    for turn in range(8, 30):
        one.worker.page.turned(turn, one.now)
        one.looks(0.2, moves=True)
    (learned,) = one.told()
    assert learned.step_s == pytest.approx(0.2, abs=0.05), "what came before the first turn was no step"
    one.worker.inside = True
    one.looks(6.0)
    assert [(v.rank, v.action) for v in one.verdicts] == [(0, "interrupt")]
    assert "after 29 turns of its loop" in one.verdicts[0].reason


def test_outside_of_its_loop_a_rank_has_nvrx_s_time(eyes):
    one = eyes()
    one.worker.page.undeclared(one.now)
    one.worker.page.turned(8, one.now)
    one.looks(89.0)
    assert one.verdicts == []
    one.looks(2.0)
    assert [(v.rank, v.action) for v in one.verdicts] == [(0, "interrupt")]


def test_a_silence_that_is_ended_from_outside_teaches_nothing(eyes):
    """The generation is being left: its ranks are woken by us."""
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    one.looks(4.0)
    seen, now = one.watch.memory, one.now + 0.2
    moved = [replace(track.seen, moved_s=now) for track in seen.tracks.values()]
    assert seen.look(moved, now, runs=False).learned.places == {}
    assert seen.look(moved, now).learned.places != {}
