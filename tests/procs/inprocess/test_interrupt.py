"""Real signals into real waits: each must end at once, and nothing but the function may be hit."""

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import os
import queue
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.inprocess.core.pursuit import Patience, Verdict
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart, Way

pytestmark = pytest.mark.procs
AT_ONCE = 0.25  # seconds; the machine is shared, measured: well under 0.01


def _sleep():
    time.sleep(60)


def _lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()


def _queue():
    queue.Queue().get()


def _simple_queue():
    queue.SimpleQueue().get()


def _recv():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def _accept():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()


def _select():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        select.select([ours], [], [])


def _poll():
    ours, theirs = os.pipe()
    try:
        poll = select.poll()
        poll.register(ours)
        poll.poll()
    finally:
        os.close(ours)
        os.close(theirs)


def _pipe():
    ours, theirs = os.pipe()
    try:
        os.read(ours, 1)
    finally:
        os.close(ours)
        os.close(theirs)


def _flock():
    with open(f"/proc/{os.getpid()}/exe", "rb") as one, open(f"/proc/{os.getpid()}/exe", "rb") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(two, fcntl.LOCK_EX)


def _event():
    threading.Event().wait()


def _join():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        thread.join()
    finally:
        end.set()
        thread.join()


def _child_wait():
    child = subprocess.Popen(["sleep", "60"])
    try:
        child.wait()
    finally:
        child.kill()
        child.wait()


def _child_run():
    subprocess.run(["sleep", "60"], check=True)


def _bytecode():
    n = 0
    while True:
        n += 1


def _regex():
    re.match(r"(a+)+$", "a" * 40 + "b")


def _held_interpreter_lock():
    ctypes.PyDLL(None).sleep(60)


def _asyncio_main():
    asyncio.run(asyncio.sleep(60))


def _signal_wait():
    signal.pause()


WAITS = [
    _sleep,
    _lock,
    _queue,
    _simple_queue,
    _recv,
    _accept,
    _select,
    _poll,
    _pipe,
    _flock,
    _event,
    _join,
    _child_wait,
    _child_run,
    _bytecode,
    _asyncio_main,
    _signal_wait,
]


@pytest.mark.parametrize("wait", WAITS, ids=lambda f: f.__name__.strip("_"))
def test_a_wait_ends_at_once(rig, wait):
    chased = rig.run(wait)
    assert rig.interrupter.way is Way.SIGNAL
    assert chased.raised
    assert chased.seconds < AT_ONCE
    assert chased.verdicts == []


def test_a_loop_of_matmuls_ends_at_once(rig):
    import torch

    def train():
        a = torch.randn(64, 64)
        while True:
            a = (a @ a).tanh()

    chased = rig.run(train)
    assert chased.raised
    assert chased.seconds < AT_ONCE


@pytest.mark.parametrize("held", [_regex, _held_interpreter_lock], ids=lambda f: f.__name__.strip("_"))
def test_what_holds_the_interpreter_lock_ends_by_a_signal_already_sent(held):
    """Nobody in Python can send meanwhile; `setitimer` stands for a signal that was on its way."""
    interrupter = Interrupter(signum=signal.SIGALRM)
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:

        def function():
            interrupter.interrupt(1)

            held()

        signal.setitimer(signal.ITIMER_REAL, 0.2)
        began = time.monotonic()
        with pytest.raises(RankShouldRestart):
            interrupter.call(1, function)
        assert time.monotonic() - began < 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        interrupter.close()
        signal.signal(signal.SIGALRM, before)


# Code that swallows, holds on, or cleans up (E20, I4)


def _swallows_every_time():
    for _ in range(5):
        with contextlib.suppress(BaseException):
            time.sleep(60)
    time.sleep(60)


def _swallows_once():
    try:
        time.sleep(60)
    except BaseException:
        pass
    time.sleep(60)


def _returns_in_finally():
    def inner():
        try:
            time.sleep(60)
        finally:
            return  # noqa: B012 - the very thing that is tested

    inner()
    time.sleep(60)


def _callback():
    async def main():
        asyncio.get_running_loop().call_soon(time.sleep, 60)
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    try:
        loop.run_until_complete(main())
    finally:
        gc.collect()
        loop.close()


def _child_task():
    async def child():
        time.sleep(60)

    async def main():
        task = asyncio.ensure_future(child())
        await asyncio.sleep(60)
        await task

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    try:
        loop.run_until_complete(main())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class _Slow:
    def __del__(self):
        time.sleep(60)


def _finalizer():
    _Slow()
    time.sleep(60)


def _weak_callback():
    class Thing:
        pass

    thing = Thing()
    kept = weakref.ref(thing, lambda _: time.sleep(60))
    del thing
    time.sleep(60)
    return kept


@contextlib.contextmanager
def _swallowing():
    try:
        yield
    except BaseException:
        pass


def _context_manager():
    with _swallowing():
        time.sleep(60)
    time.sleep(60)


SWALLOWERS = [
    _swallows_once,
    _swallows_every_time,
    _returns_in_finally,
    _callback,
    _child_task,
    _finalizer,
    _weak_callback,
    _context_manager,
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("code", SWALLOWERS, ids=lambda f: f.__name__.strip("_"))
def test_code_that_swallows_is_interrupted_again(rig, code, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    chased = rig.run(code)
    assert chased.raised
    assert chased.verdicts
    assert set(chased.verdicts) <= {Verdict.AGAIN, Verdict.SEVER}
    assert chased.seconds < 2


def test_clean_up_is_not_disturbed_within_its_grace(rig):
    done = []

    def function():
        try:
            time.sleep(60)
        finally:
            for n in range(10):
                time.sleep(0.02)
                done.append(n)

    chased = rig.run(function)
    assert chased.raised
    assert done == list(range(10))
    assert chased.verdicts == []


def test_clean_up_over_many_frames_may_take_longer_than_one_grace(rig):
    done = []

    def nested(depth):
        if not depth:
            time.sleep(60)
        try:
            nested(depth - 1)
        finally:
            time.sleep(0.15)
            done.append(depth)

    chased = rig.run(lambda: nested(8))
    assert done == list(range(1, 9))
    assert chased.verdicts == []
    assert chased.seconds > 1


def test_an_executor_that_waits_for_its_thread_is_left_by_the_second_raise(rig):
    end = threading.Event()

    def function():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(end.wait).result()

    chased = rig.run(function)
    end.set()
    assert chased.raised
    assert chased.verdicts == [Verdict.AGAIN]
    assert 0.25 < chased.seconds < 1.5
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()


def test_clean_up_that_never_ends_is_given_up(rig):
    """It cannot be left from inside: the verdict is what counts; here the test ends it."""
    end = threading.Event()

    def function():
        while not end.is_set():
            try:
                end.wait(60)
            except BaseException:
                continue

    seen = []
    pursue = rig.interrupter.pursue

    def watched(now):
        verdict = pursue(now)
        seen.append(verdict)
        if verdict is Verdict.REPLACE:
            end.set()
        return verdict

    rig.interrupter.pursue = watched
    chased = rig.run(function)
    assert not chased.raised
    assert Verdict.REPLACE in chased.verdicts
    assert Verdict.SEVER in chased.verdicts
    assert chased.seconds == pytest.approx(7 * 0.3, abs=0.6)


# What must not be hit


def test_an_atomic_section_is_whole_and_its_end_raises(rig):
    done = []

    def function():
        with rig.interrupter.atomic():
            for n in range(10):
                time.sleep(0.02)
                done.append(n)
            with rig.interrupter.atomic():
                done.append("inner")
            done.append("outer")
        done.append("after")

    chased = rig.run(function)
    assert chased.raised
    assert done == [*range(10), "inner", "outer"]


def test_an_import_is_whole_and_the_function_is_left_after_it(rig, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\nbegun = True\ntime.sleep(0.3)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def function():
        import slow_to_import

        assert slow_to_import.whole
        time.sleep(60)

    chased = rig.run(function)
    assert chased.raised
    assert 0.2 < chased.seconds < 1
    assert sys.modules.pop("slow_to_import").whole


def test_an_import_without_end_is_given_up(rig, tmp_path, monkeypatch):
    (tmp_path / "endless_to_import.py").write_text("import threading\nend = threading.Event()\nend.wait(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rig.interrupter._patience = Patience(defer_s=0.5)
    pursue = rig.interrupter.pursue

    def watched(now):
        verdict = pursue(now)
        if verdict is Verdict.REPLACE:
            sys.modules["endless_to_import"].end.set()
        return verdict

    rig.interrupter.pursue = watched

    def function():
        import endless_to_import

        return endless_to_import

    chased = rig.run(function)
    assert Verdict.REPLACE in chased.verdicts
    assert chased.seconds > 0.5
    del sys.modules["endless_to_import"]


def test_a_wish_before_the_call_is_honoured_at_its_beginning(rig):
    ran = []
    rig.interrupter.interrupt(5)
    with pytest.raises(RankShouldRestart) as caught:
        rig.interrupter.call(5, lambda: ran.append(1))
    assert caught.value.generation == 5
    assert not ran


def test_a_late_wish_for_a_left_generation_does_nothing(rig):
    assert rig.interrupter.call(5, lambda: "five") == "five"
    rig.interrupter.interrupt(5)

    def function():
        rig.interrupter.interrupt(5)
        time.sleep(0.05)
        return "six"

    assert rig.interrupter.call(6, function) == "six"


def test_values_and_errors_pass_through(rig):
    assert rig.interrupter.call(1, lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        rig.interrupter.call(2, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        rig.interrupter.call(3, lambda: sys.exit(3))


def _spin(turns):
    while turns:
        turns -= 1


LONG = (pytest.mark.long, pytest.mark.timeout(300))


@pytest.mark.parametrize(("hits", "limit_s"), [(300, 15), pytest.param(20000, 240, marks=LONG)])
@pytest.mark.parametrize("way", list(Way))
def test_no_interrupt_escapes_the_call(rig, hits, limit_s, way, monkeypatch):
    """Interrupts rain while short calls begin and end; each exception comes out of its own call and of nothing else."""
    if way is Way.ASYNCHRONOUS:
        monkeypatch.setattr(rig.interrupter, "_signal_works", lambda: False)
    present, over, dice = [0], threading.Event(), random.Random(1)

    def rain():
        while not over.is_set():
            rig.interrupter.interrupt(present[0])
            rig.interrupter.pursue(time.monotonic())

    thread = threading.Thread(target=rain)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    hit, generation, escaped, until = 0, 0, [], time.monotonic() + limit_s
    try:
        while hit < hits and time.monotonic() < until:
            generation += 1
            try:
                present[0] = generation
                length = dice.randrange(2_000)
                try:
                    rig.interrupter.call(generation, lambda n=length: _spin(n))
                except RankShouldRestart:
                    hit += 1
                sum(range(50))
            except BaseException as error:
                escaped.append(error)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert not escaped
    assert hit > hits / 10, "on a machine so busy nothing was proven"


# Whose signal it is (I3, E21)


def _short_sleeps():
    while True:
        time.sleep(0.01)


def test_a_taken_signal_is_seen_and_the_second_way_is_used(rig):
    assert rig.interrupter.call(1, lambda: 1) == 1
    number = rig.interrupter._signum
    assert number == signal.SIGRTMIN + 5
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(number, file=nowhere)
        assert signal.getsignal(number) == rig.interrupter._on_signal, "E21: the theft does not show"
        chased = rig.run(_short_sleeps)
        faulthandler.unregister(number)
    assert rig.interrupter.way is Way.ASYNCHRONOUS
    assert chased.raised


def test_a_signal_stolen_inside_the_function_falls_back_too(rig):
    def function():
        signal.signal(rig.interrupter._signum, lambda *_: None)
        _short_sleeps()

    chased = rig.run(function)
    assert chased.raised


def test_a_signal_in_use_is_left_to_its_owner():
    signal.signal(signal.SIGRTMIN + 5, lambda *_: None)
    interrupter = Interrupter()
    try:
        assert interrupter.call(1, lambda: 1) == 1
        assert interrupter._signum == signal.SIGRTMIN + 6
    finally:
        interrupter.close()
        signal.signal(signal.SIGRTMIN + 5, signal.SIG_DFL)


def test_a_blocked_signal_is_unblocked(rig):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGRTMIN + 5,))
    try:
        chased = rig.run(_sleep)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGRTMIN + 5,))
    assert rig.interrupter.way is Way.SIGNAL
    assert chased.seconds < AT_ONCE


def test_a_function_in_another_thread_is_interrupted_the_second_way(rig):
    caught = []

    def other():
        chased = rig.run(_short_sleeps)
        caught.append((rig.interrupter.way, chased.raised))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert caught == [(Way.ASYNCHRONOUS, True)]


def test_closing_gives_the_signal_back():
    interrupter = Interrupter()
    interrupter.call(1, lambda: 1)
    interrupter.close()
    assert signal.getsignal(signal.SIGRTMIN + 5) == signal.SIG_DFL
