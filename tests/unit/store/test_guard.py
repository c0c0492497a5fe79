"""The guard's thread, with deadlines that are long past or far away."""

import threading

from everstep.store.guard import Guard


def test_a_late_call_is_severed_and_a_timely_one_is_not():
    severed = threading.Event()
    guard = Guard("test")
    try:
        with guard.watch(1000, severed.set) as timely:
            pass
        with guard.watch(0, severed.set) as late:
            assert severed.wait(20)
        assert (timely.fired, late.fired) == (False, True)
    finally:
        guard.close()
    assert not any("everstep-guard-test" in t.name for t in threading.enumerate())


def test_the_nearest_deadline_comes_first_whatever_the_order():
    severed, ready = [], threading.Event()
    guard = Guard("test")
    try:
        far = guard.watch(1000, lambda: severed.append("far"))
        near = guard.watch(0, lambda: (severed.append("near"), ready.set()))
        with far, near:
            assert ready.wait(20)
        assert severed == ["near"]
    finally:
        guard.close()


def test_many_calls_leave_nothing_behind():
    guard = Guard("test")
    try:
        for _ in range(1000):
            with guard.watch(1000, lambda: None):
                pass
        assert guard._waiting == []
    finally:
        guard.close()


def test_calls_that_end_in_time_wake_the_thread_once_for_all_of_them(monkeypatch):
    guard, woken = Guard("test"), []
    notify = guard._changed.notify
    monkeypatch.setattr(guard._changed, "notify", lambda: (woken.append(1), notify()))
    try:
        for _ in range(100):
            with guard.watch(1000, lambda: None):
                pass
        assert len(woken) == 1
        for _ in range(2):  # nearer than what the thread sleeps for
            severed = threading.Event()
            with guard.watch(0.001, severed.set):
                assert severed.wait(20)
    finally:
        guard.close()


def test_what_has_ended_is_never_severed_later():
    severed = []
    guard = Guard("test")
    first = guard.watch(0.001, lambda: severed.append(1))
    first.__enter__()
    first.__exit__(None, None, None)
    fired = bool(severed)
    ready = threading.Event()
    with guard.watch(0.005, ready.set):
        assert ready.wait(20)
    guard.close()
    assert bool(severed) == fired == first.fired
