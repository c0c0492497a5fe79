"""Marks of progress: pings, what stops them, and a watchdog that tells them."""

import os
import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")

from everstep.inprocess import monitor_thread, progress_watchdog
from everstep.inprocess.iteration import Marks
from everstep.process.page import Page, Phase


class Ticks:
    """Time as the test has it."""

    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at


@pytest.fixture
def page():
    fd = Page.create("test")
    made = Page(fd)
    os.close(fd)
    yield made
    made.close()


def test_the_first_ping_arms_the_manual_mark(page):
    """A loop of bytecode without progress: NVRx sees it by `ping` alone, and so do we, from the first one on."""
    clock = Ticks()
    made = Marks(page, clock)
    page.enter(3, clock.at)
    made.begin()
    assert (page.read().phase, page.read().pinged) == (Phase.STEP, False)
    for _ in range(3):
        clock.at += 7
        made.ping()
    reading = page.read()
    assert (reading.pinged, reading.mark_s, reading.step) == (True, clock.at, 3)
    assert reading.step == reading.from_step, "a ping is no step: limits are not learned from it"
    page.enter(4, clock.at)
    made.begin()
    assert (page.read().pinged, page.read().step) == (False, 0), "each iteration is armed anew"


def test_hang_protection_can_be_switched_off(page):
    clock = Ticks()
    made = Marks(page, clock)
    made.begin()
    with made.unprotected():
        reading = page.read()
        assert (reading.phase, reading.limit_s, reading.name) == (Phase.DECLARED, 0.0, "hang protection disabled")
        clock.at += 1000
    assert (page.read().phase, page.read().mark_s) == (Phase.STEP, clock.at)
    with pytest.raises(ValueError, match="left"), made.unprotected():
        raise ValueError("left")
    assert page.read().phase == Phase.DECLARED, "the next iteration says what it does"


def test_timestamps_time_out_by_either_mark():
    stamp, clock, limit = progress_watchdog.Timestamp, Ticks(), timedelta(seconds=3)
    assert not stamp().is_timed_out(limit, clock)
    assert stamp(auto=96).is_timed_out(limit, clock)
    assert stamp(auto=99, manual=96).is_timed_out(limit, clock)
    assert not stamp(auto=99, manual=98).is_timed_out(limit, clock)


def test_a_watchdog_tells_marks_and_ends():
    told, enough = [], threading.Event()

    class Listener:
        def send_timestamp(self, timestamp):
            told.append(timestamp)
            if timestamp.auto is not None:
                enough.set()

    dog = progress_watchdog.ProgressWatchdog(0, Listener(), timedelta(seconds=0.001))
    dog.start()
    try:
        dog.ping()
        assert told[0].manual is not None
        while not enough.is_set():  # this is the main thread, and it runs bytecode
            pass
        dog.pause_and_synchronize()
        dog.spin_till_paused()
        count = len(told)
        dog.resume()
        while len(told) == count:
            pass
    finally:
        dog.shutdown(20)
    assert not dog.is_alive()


class Told:
    """A store in which somebody is interrupted when the test says so."""

    def __init__(self):
        self.interrupted = threading.Event()
        self.locked = False

    def wait_for_interrupted(self, timeout):
        if not self.interrupted.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")

    def lock_interruption_records(self):
        self.locked = True

    def get_interruption_records(self):
        return ["EXCEPTION:1"]


class Quiet:
    def pause_and_synchronize(self):
        pass


def test_a_monitor_thread_aborts_and_raises_in_the_main_thread():
    store, aborted = Told(), []
    arguments = (timedelta(seconds=0.001), Quiet(), timedelta(seconds=20), timedelta(0), threading.RLock(), True)
    thread = monitor_thread.MonitorThread("state", store, aborted.append, *arguments)
    thread.start()
    with pytest.raises(monitor_thread.RankShouldRestart, match="EXCEPTION:1"):  # noqa: PT012
        store.interrupted.set()
        while True:
            pass
    thread.maybe_join(20)
    assert not thread.is_alive()
    assert aborted == ["state"]
    assert store.locked
    idle = monitor_thread.MonitorThread("state", Told(), None, *arguments)
    idle.start()
    idle.shutdown()
    assert not idle.is_alive()
    with pytest.raises(ValueError, match="no thread"):
        monitor_thread.async_raise(2**40, ValueError)
