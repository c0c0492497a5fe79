"""IR-09: places where user code eats an exception that came from outside, and places where it must not come."""

import concurrent.futures
import contextlib
import ctypes
import gc
import io
import json
import logging
import os
import random
import signal
import sys
import threading
import time

import pytest

from everstep.inprocess.core.pursuit import Patience, Verdict
from everstep.inprocess.interrupt import RankShouldRestart, Way

pytestmark = pytest.mark.procs
SOON_S = 5.0  # a guard; measured: one more raise comes 0.05 s later


# Swallowed once, or for as long as it comes


def _callback_of_c():
    """`qsort` calls Python; ctypes prints what that raises and goes on."""
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: time.sleep(60) or 0)
    numbers = (ctypes.c_int * 2)(2, 1)
    ctypes.CDLL(None).qsort(numbers, 2, ctypes.sizeof(ctypes.c_int), compare)
    time.sleep(60)


def _retry_loop():
    for _ in range(4):
        try:
            time.sleep(60)
        except BaseException as error:
            print(error, file=io.StringIO())
            continue
    time.sleep(60)


def _bare_except():
    try:
        time.sleep(60)
    except:  # noqa: E722 - the very thing that is tested
        pass
    time.sleep(60)


def _break_in_finally():
    while True:
        try:
            time.sleep(60)
        finally:
            break  # noqa: B012
    time.sleep(60)


def _generator_that_goes_on():
    def numbers():
        while True:
            with contextlib.suppress(BaseException):
                yield time.sleep(60)
            return

    for _ in numbers():
        pass
    time.sleep(60)


def _gc_callback():
    def slow(phase, info):
        if phase == "start":
            time.sleep(60)

    gc.callbacks.append(slow)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(slow)
    time.sleep(60)


def _signal_handler_of_the_user():
    def handler(*_):
        with contextlib.suppress(BaseException):
            time.sleep(60)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(60)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _exit_stack():
    with contextlib.ExitStack() as stack:
        stack.push(lambda *_: True)  # swallows whatever comes
        time.sleep(60)
    time.sleep(60)


def _trace_of_a_thread_pool():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with contextlib.suppress(BaseException):
            concurrent.futures.wait([pool.submit(threading.Event().wait, 0.2)])
            time.sleep(60)
        time.sleep(60)


SWALLOWERS = [
    _callback_of_c,
    _retry_loop,
    _bare_except,
    _break_in_finally,
    _generator_that_goes_on,
    _gc_callback,
    _signal_handler_of_the_user,
    _exit_stack,
    _trace_of_a_thread_pool,
]


@pytest.mark.parametrize("code", SWALLOWERS, ids=lambda f: f.__name__.strip("_"))
def test_code_that_swallows_is_interrupted_again_until_it_yields(rig, code, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    chased = rig.run(code)
    assert chased.raised
    assert Verdict.AGAIN in chased.verdicts
    assert Verdict.REPLACE not in chased.verdicts
    assert chased.seconds < SOON_S


# Passed through at once


def _except_exception():
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def _suppressed_exceptions():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


def _lock_held():
    with LOCK:
        time.sleep(60)


def _logging_handler():
    class Slow(logging.Handler):
        def emit(self, record):
            try:
                time.sleep(60)
            except Exception:
                self.handleError(record)

    logger = logging.Logger("slow")
    logger.addHandler(Slow())
    logger.warning("hello")


def _json_of_something_huge():
    thing = [list(range(50)) for _ in range(2000)]
    while True:
        json.dumps(thing)


def _future():
    concurrent.futures.Future().result()


def _input():
    """A question that nobody answers."""
    read, write = os.pipe()
    before, sys.stdin = sys.stdin, os.fdopen(read)
    try:
        input()
    finally:
        sys.stdin.close()
        sys.stdin = before
        os.close(write)


LOCK = threading.Lock()
PASSES = [
    _except_exception,
    _suppressed_exceptions,
    _lock_held,
    _logging_handler,
    _json_of_something_huge,
    _future,
    _input,
]


@pytest.mark.parametrize("code", PASSES, ids=lambda f: f.__name__.strip("_"))
def test_it_passes_through_what_is_written_for_exceptions(rig, code):
    chased = rig.run(code)
    assert chased.raised
    assert set(chased.verdicts) <= {Verdict.AGAIN}, "on a busy machine it may be sent before it could be heard"
    assert chased.seconds < SOON_S
    assert LOCK.acquire(blocking=False), "a lock that `with` holds is given back"
    LOCK.release()


# A data loader's worker that does not answer


def a_loader_waits(rank, port, how):
    """The main thread waits for a batch, or, in `__del__`, for a worker that does not end."""
    from small import At, Small
    from torch.utils.data import DataLoader

    class Data:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index:
                time.sleep(600)
            return index

    small = Small()

    def batch():
        for n, _ in enumerate(DataLoader(Data(), num_workers=2)):
            assert n == 0
            small.ready.set()

    def deleted():
        iterator = iter(DataLoader(Data(), num_workers=2))
        next(iterator)
        small.ready.set()
        del iterator  # waits 5 s for each worker, and what comes meanwhile is ignored there
        time.sleep(60)

    small.stop(At(0, rank, 1, ("127.0.0.1", port)), batch if how == "batch" else deleted)
    return [type(small.error).__name__, small.left_s, list(small.dirt), len(small.cleaning.killed)]


@pytest.mark.parametrize("how", ["batch", "deleted"])
def test_a_wait_for_a_loader_s_workers_is_left_and_they_are_gone(forks, how):
    ((_, left_s, dirt, killed),) = forks.run(a_loader_waits, ranks=1, how=how)
    assert left_s < SOON_S
    assert dirt == []
    assert killed <= 2


# Never inside


def sections(interrupter, books, dice=random.Random(7)):  # noqa: B008 - one sequence for all calls
    """Open and close atomic sections for ever, one in another."""
    while True:
        for _ in range(dice.randrange(200)):
            pass
        with interrupter.atomic():
            books["opened"] += 1
            for _ in range(dice.randrange(300)):
                pass
            with interrupter.atomic():
                pass
            books["closed"] += 1


STORM = (pytest.mark.long, pytest.mark.timeout(300))


@pytest.mark.parametrize(("rounds", "limit_s"), [(60, 30), pytest.param(3000, 240, marks=STORM)])
@pytest.mark.parametrize("way", list(Way))
def test_nothing_comes_inside_atomic_however_often_it_is_sent(rig, rounds, limit_s, way, monkeypatch):
    """Interrupts and pursuits rain on calls that open and close sections; each section is whole."""
    if way is Way.ASYNCHRONOUS:
        monkeypatch.setattr(rig.interrupter, "_signal_works", lambda: False)
    rig.interrupter._patience = Patience(settle_s=0.0, grace_s=100.0)
    present, over, books = [0], threading.Event(), {"opened": 0, "closed": 0}

    def rain():
        while not over.is_set():
            rig.interrupter.interrupt(present[0])
            rig.interrupter.pursue(time.monotonic())

    thread = threading.Thread(target=rain)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    hit, until = 0, time.monotonic() + limit_s
    try:
        while hit < rounds and time.monotonic() < until:
            present[0] += 1
            with pytest.raises(RankShouldRestart):
                rig.interrupter.call(present[0], lambda: sections(rig.interrupter, books))
            hit += 1
            assert books["opened"] == books["closed"]
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert hit > rounds / 10, "on a machine so busy nothing was proven"
    assert books["opened"] > 0


def test_an_import_that_swallows_nothing_and_takes_long_is_whole_though_it_is_sent_again(rig, tmp_path, monkeypatch):
    """The pursuit sends again and again while the import runs; none of it is raised there."""
    (tmp_path / "busy_to_import.py").write_text("n = 0\nwhile n < 2_000_000:\n    n += 1\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def function():
        import busy_to_import

        assert busy_to_import.whole
        time.sleep(60)

    try:
        chased = rig.run(function, after_s=0.0)
        assert chased.raised
    finally:
        module = sys.modules.pop("busy_to_import", None)
    assert module is None or module.whole
