"""The agent's eyes over a page in memory: what is asked, and what the ledger is told. Time is a number."""

import os
import random
import signal
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest

from everstep.events import LimitLearned, Notice
from everstep.launcher.agent.watch import INTERVAL_S, Watch
from everstep.launcher.agent.worker import Worker
from everstep.launcher.core.limits import Own
from everstep.process.monitor import AT
from everstep.process.monitor import SIZE as MONITOR_SIZE
from everstep.process.page import SIZE, Page

_IDLE = 1  # a process that sleeps: what the kernel says of it is real
STACK = '  File "/home/u/train.py", line 9, in wait\n    child.wait()\n'


class Eyes:
    """A watch and one rank whose page the test writes."""

    def __init__(self, own: Own | None = None, *, deaf: bool = False) -> None:
        fd = Page.create("watched")
        self.asked: list[dict] = []
        process = SimpleNamespace(pid=_IDLE, send=self.asked.append)
        self.worker = Worker(process, fd, Page(fd), 0)
        self.watch, self.now, self.verdicts, self.news = Watch(own or Own(), deaf=deaf), 100.0, [], []
        (self.worker.page.began if deaf else self.worker.page.enter)(0, self.now)
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
            if self.worker.probe_sent is not None and not self.watch.deaf:
                self.worker.probe_sent, self.worker.heard_s = None, self.now
                self.worker.waiting, self.worker.stack = False, STACK
            self.verdicts += self.watch.look({0: self.worker}, self.now)
            self.news += self.watch.news()

    def told(self, kind: type = LimitLearned) -> list:
        return [event for event in self.news if isinstance(event, kind)]


@pytest.fixture
def eyes():
    made: list[Eyes] = []

    def make(own: Own | None = None, *, deaf: bool = False) -> Eyes:
        made.append(Eyes(own, deaf=deaf))
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


DUMPED = b'Current thread 0x7f (most recent call first):\n  File "/home/u/train.py", line 9 in wait\n'


def monitored(eyes, *, beats: bool = True):
    """A script that knows nothing of us, and has a limit of 3 s between its heartbeats."""
    one = eyes(deaf=True)
    one.worker.page.monitor.begin(0, one.worker.process.pid, ["save"], one.now)
    one.worker.page.monitor.limits(30.0, 3.0, 0.0, [60.0])
    if beats:
        one.worker.page.monitor.beat(1, one.now)
    return one


def test_a_script_that_knows_nothing_of_us_has_no_limit_but_its_monitor_s(eyes):
    bare = eyes(deaf=True)
    bare.looks(4000.0)
    assert bare.verdicts == []
    one = monitored(eyes, beats=False)
    one.looks(29.5)
    assert one.worker.probe_sent is None, "nobody is disturbed before it is overdue"
    one.looks(1.0)
    assert one.worker.probe_sent is not None
    assert one.asked == [], "it would not hear a message"


def test_what_a_signal_makes_it_write_is_its_answer_and_no_limit_is_raised(eyes):
    one = monitored(eyes)
    one.looks(3.4)
    assert one.worker.probe_sent is not None
    os.pwrite(one.worker.page_fd, DUMPED, SIZE)
    one.looks(0.2)
    assert [(v.rank, v.action) for v in one.verdicts] == [(0, "interrupt")]
    assert "no heartbeat for 3.6 s, idle; limit 3.0 s" in one.verdicts[0].reason
    assert one.worker.stack == '  File "/home/u/train.py", line 9, in wait\n'
    assert one.watch.memory.learned.raised_s == 0
    assert one.told() == []


def test_without_an_answer_it_is_named_as_one_that_gives_none(eyes):
    one = monitored(eyes)
    one.looks(5.2)
    assert [(v.rank, v.action) for v in one.verdicts[:1]] == [(0, "kill")]
    assert "does not answer" in one.verdicts[0].reason


def test_a_heartbeat_that_comes_after_all_voids_what_was_asked(eyes):
    one = monitored(eyes)
    one.looks(3.4)
    assert one.worker.probe_sent is not None
    one.worker.page.monitor.beat(2, one.now)
    one.looks(2.8)
    assert (one.worker.probe_sent, one.worker.heard_s, one.verdicts) == (None, None, [])


def test_a_section_stands_in_place_of_what_is_learned_of_a_wrapped_function(eyes):
    one = eyes()
    one.looks(2.0, steps_s=0.2)
    monitor = one.worker.page.monitor
    monitor.begin(0, one.worker.process.pid, ["save"], one.now)
    monitor.limits(0.0, 0.0, 0.0, [20.0])
    monitor.open(0, one.now)
    one.looks(19.0)
    assert one.verdicts == []
    one.looks(2.0)
    assert [(v.rank, v.action) for v in one.verdicts[:1]] == [(0, "interrupt")]
    assert "section 'save' is open for 20." in one.verdicts[0].reason


def test_the_stack_of_a_child_that_begins_the_script_is_asked_for_and_of_nobody_else(eyes):
    one = monitored(eyes)
    assert one.worker.speaker == one.worker.process.pid
    one.worker.page.monitor.begin(0, os.getpid(), [], one.now)
    assert one.worker.speaker == one.worker.process.pid, "we are not of its session"


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_process_writes_into_its_page_nobody_but_itself_is_hurt_by_it(eyes, seed):
    """It is the user's to write: the agent's look raises nothing, and no other process is sent a signal."""
    chance = random.Random(seed)
    one = eyes(deaf=seed % 2 == 0)
    one.worker.page.monitor.begin(0, one.worker.process.pid, ["a", "b"], one.now)
    for _ in range(20):
        at = AT + chance.choice((8 * chance.randrange(14), chance.randrange(MONITOR_SIZE - 8)))
        word = chance.choice((chance.randbytes(8), struct.pack("=q", chance.choice((-1, 0, 1, 2**62, os.getpid())))))
        os.pwrite(one.worker.page_fd, word, at)
        one.now += INTERVAL_S
        one.watch.observe({0: one.worker}, one.now)
        assert one.worker.speaker == one.worker.process.pid
        assert one.worker.dump_by == 0 or signal.SIGRTMIN <= one.worker.dump_by <= signal.SIGRTMAX
        assert one.worker.requested is None or isinstance(one.worker.requested.text, str)
