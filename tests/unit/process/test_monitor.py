"""A rank monitor's words: what is stored is read, beside the progress page's own and the stacks behind both."""

import os

import pytest

from everstep.process.monitor import AT, MOST_SECTIONS, Request, Section
from everstep.process.page import SIZE, Page
from everstep.process.stacks import main_thread, waits


@pytest.fixture
def page():
    fd = Page.create("monitored")
    made = Page(fd)
    yield made
    made.close()
    os.close(fd)


def test_nothing_is_said_before_monitoring_begins_and_after_its_end(page):
    assert page.monitor.read() is None
    assert page.monitor.owner is None
    assert page.monitor.requested is None
    page.monitor.begin(2, 77, ["a"], 5.0)
    assert page.monitor.owner == (2, 77)
    page.monitor.end()
    assert page.monitor.read() is None


def test_what_is_stored_is_read_and_the_page_s_own_words_are_left_alone(page):
    page.enter(2, 1.0)
    page.step_done(9, 2.0)
    before = page.read()
    names = [f"section {number}" for number in range(MOST_SECTIONS - 1)] + ["é" * 40]
    monitor = page.monitor
    monitor.begin(2, 77, names, 5.0)
    monitor.limits(1.0, 2.0, 1e300, [float(number) for number in range(MOST_SECTIONS)])
    monitor.beat(3, 7.5)
    monitor.open(MOST_SECTIONS - 1, 8.0)
    monitor.open(1, 9.0)
    said = monitor.read()
    assert (said.generation, said.started_s, said.beats, said.beat_s, said.event_s) == (2, 5.0, 3, 7.5, 9.0)
    assert (said.initial_s, said.subsequent_s, said.outside_limit_s, said.outside_s) == (1.0, 2.0, 1e9, 0.0)
    assert said.sections == (Section("section 1", 9.0, 1.0), Section("é" * 24, 8.0, float(MOST_SECTIONS - 1)))
    monitor.close([1], 10.0, last=False)
    monitor.close([MOST_SECTIONS - 1], 11.0, last=True)
    assert (monitor.read().sections, monitor.read().outside_s, monitor.read().events) == ((), 11.0, 4)
    assert page.read() == before
    monitor.begin(3, 77, names[:2], 20.0)
    said = monitor.read()
    assert (said.beats, said.events, said.initial_s, said.sections, said.outside_s) == (0, 0, 0.0, (), 20.0)


def test_a_request_outlives_monitoring_and_its_text_is_cut(page):
    page.monitor.request(1, "x" * 1000)
    page.monitor.begin(0, 1, [], 0.0)
    assert page.monitor.requested == Request(1, 1, "x" * 384)
    page.monitor.request(2, "")
    assert page.monitor.requested == Request(2, 2, "")


def test_the_words_fit_into_the_page():
    assert AT % 4096 == SIZE % 4096 == 0
    assert MOST_SECTIONS > 100


DUMPED = """Thread 0x00007f1c (most recent call first):
  File "/x/threading.py", line 324 in wait

Current thread 0x00007f2d (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/u/my train.py", line 12 in <module>

Extension modules: numpy (total: 1)
"""


def test_a_dumped_stack_is_read_as_a_traceback():
    stack = main_thread(DUMPED)
    assert stack.splitlines() == [
        '  File "/home/u/my train.py", line 12, in <module>',
        '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 5356, in barrier',
    ]
    assert waits(stack)
    assert not waits(stack.splitlines()[0])
    assert main_thread("") == main_thread("Current thr") == ""
    assert not waits("")
