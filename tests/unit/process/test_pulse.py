"""The automatic sign: the main thread's interpreter runs, or stands in a call of C."""

import ctypes
import sys
import threading

import pytest

from everstep.process import pulse
from everstep.process.pulse import Effort, Places, Pulse


def beats_during(act, count=3):
    """Beat from another thread, before, while and after the main thread does `act(until_beaten)`."""
    pulse, go, gone, told = Pulse(), threading.Event(), threading.Event(), []

    def ticker():
        pulse.beat()
        go.wait(10)
        pulse.beat()  # what was on its way before the act began
        told.extend(pulse.beat() for _ in range(count))
        gone.set()

    thread = threading.Thread(target=ticker)
    thread.start()
    act(go, gone)
    thread.join(10)
    for _ in range(1000):  # bytecode, at last
        pass
    told.append(pulse.beat())
    return told


def test_a_main_thread_that_stands_in_c_gives_no_sign_and_gives_one_when_it_comes_back():
    def waits(go, gone):
        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=lambda: (gone.wait(10), lock.release())).start()
        go.set()
        lock.acquire()

    *inside, after = beats_during(waits)
    assert inside[1:] == [False, False]
    assert after


def test_a_main_thread_that_runs_bytecode_gives_a_sign_each_time():
    pulse, over, told = Pulse(), threading.Event(), []

    def ticker():
        while len(told) < 20:
            told.append(pulse.beat())
            over.wait(0.002)
        over.set()

    thread = threading.Thread(target=ticker)
    thread.start()
    while not over.is_set():
        pass
    thread.join(10)
    assert sum(told) > 10


def test_one_call_is_on_its_way_at_most():
    """The interpreter has room for 32, and they are everybody's."""
    pulse = Pulse()
    held = ctypes.pythonapi["Py_AddPendingCall"]
    held.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    pulse.beat()
    before = pulse._asked
    for _ in range(3):
        pulse.beat()
    assert pulse._asked - before <= 3
    assert pulse._asked - pulse._count() <= 1


@pytest.mark.parametrize("count", [50])
def test_pulses_do_not_mix(count):
    pulses = [Pulse() for _ in range(count)]
    for each in pulses[::2]:
        each.beat()
    for _ in range(1000):
        pass
    assert not any(each.beat() for each in pulses[1::2])
    assert all(each.beat() for each in pulses[::2])


def test_another_thread_shows_itself_by_the_cpu_that_it_uses():
    """Pending calls run on the main thread alone, so a thread that waits must not be judged by what that one does."""
    begun, wake, over = threading.Event(), threading.Event(), threading.Event()

    def works():
        begun.set()
        wake.wait(10)
        for _ in range(100_000):
            pass
        over.wait(10)

    thread = threading.Thread(target=works)
    thread.start()
    begun.wait(10)
    sign = pulse.of(thread.ident)
    assert isinstance(sign, Effort)
    while sign.beat():  # on its way into the wait
        pass
    assert not any(sign.beat() for _ in range(1000))
    wake.set()
    while not sign.beat():
        pass
    over.set()
    thread.join(10)


def test_the_main_thread_is_asked_for_bytecode():
    assert isinstance(pulse.of(threading.main_thread().ident), Pulse)


def test_a_thread_that_is_only_looked_at_gives_no_sign(monkeypatch):
    """Seen: each look at the stack of a rank that hung woke its thread for 20 µs, and was taken for its end."""
    used = [0.0, *(20e-6 * n for n in range(1, 10)), 0.5, 0.5, 0.5003]
    monkeypatch.setattr(pulse, "cpu_of", lambda _: used.pop(0))
    sign = Effort(1)
    assert [sign.beat() for _ in range(9)] == [False] * 9
    assert [sign.beat() for _ in range(3)] == [True, False, True]


def test_places_are_counted_since_the_last_sign():
    places, lines = Places(), compile("\n".join("look()" for _ in range(200)), "many.py", "exec")
    told = [places.look(1, frame) for frame in [sys._getframe()] * 5]
    assert told == [1] * 5
    exec(lines, {"look": lambda: told.append(places.look(1, sys._getframe(1)))})
    assert told[5:8] == [2, 3, 4]
    assert told[-1] == Places.MOST
    assert places.look(2, sys._getframe()) == 1
    assert places.look(3, None) == 0
