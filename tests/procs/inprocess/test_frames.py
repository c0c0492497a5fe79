"""IR-01 and Z8: nothing of a failed attempt lives on, whatever shape the failure had."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from everstep.inprocess import frames
from everstep.inprocess.frames import Leftovers, describe, drop

pytestmark = pytest.mark.procs


class Model:
    """Stands for what must die. Cyclic, as FSDP2's parameters are."""

    def __init__(self):
        self.me = self


def _plain(model):
    raise ValueError("plain")


def _nested(model, depth=20):
    held = [model, depth]
    if depth:
        _nested(model, depth - 1)
    raise ValueError(len(held))


def _from_cause(model):
    try:
        _plain(model)
    except ValueError as cause:
        raise RuntimeError("outer") from cause


def _context(model):
    try:
        _plain(model)
    except ValueError:
        raise RuntimeError("while handling")  # noqa: B904


def _group(model):
    errors = []
    for make in (_plain, _from_cause):
        try:
            make(model)
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("several", errors)


def _generator(model):
    def values():
        held = model
        while True:
            yield held

    suspended = values()
    next(suspended)
    _plain(model)


def _in_arguments(model):
    raise ValueError(model)


def _attribute(model):
    model.there_is_no_such_thing  # noqa: B018


def _stop_iteration(model):
    raise StopIteration(model)


def _on_itself(model):
    error = ValueError("mine")
    error.model = model
    raise error


def _finalizer(model):
    class Cyclic:
        def __init__(self):
            self.me, self.model = self, model

        def __del__(self):
            self.model = None

    Cyclic()
    _plain(model)


def _context_manager(model):
    @contextlib.contextmanager
    def manager():
        held = model
        try:
            yield held
        finally:
            del held

    with manager():
        _plain(model)


SHAPES = [
    _plain,
    _nested,
    _from_cause,
    _context,
    _group,
    _generator,
    _in_arguments,
    _attribute,
    _stop_iteration,
    _on_itself,
    _finalizer,
    _context_manager,
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__.strip("_"))
def test_the_model_is_dead_before_the_next_call(shape):
    def attempt():
        model = Model()
        seen.append(weakref.ref(model))
        shape(model)

    seen, kept = [], None
    try:
        attempt()
    except Exception as error:
        kept = error
    assert seen[0]() is not None
    assert type(kept).__name__ in describe(kept)
    drop(kept)
    gc.collect()
    assert seen[0]() is None
    assert kept.__traceback__ is None


class Mute(Exception):
    """An exception whose text cannot be made."""

    def __str__(self):
        raise ZeroDivisionError("no text")


class Hostile(Exception):
    """One that fights back: attributes that cannot be set, a cycle of contexts."""

    __slots__ = ()


def test_an_error_without_a_text_is_described_by_its_frames():
    try:
        raise Mute
    except Mute as error:
        text = describe(error)
    assert "Mute" in text
    assert "test_an_error_without_a_text" in text


def test_a_cycle_of_contexts_ends():
    one, two = Hostile(), Hostile()
    one.__context__, two.__context__ = two, one
    drop(one)
    assert one.__context__ is None
    assert two.__context__ is None


def test_a_long_text_is_cut_in_the_middle():
    text = describe(ValueError("x" * 1000), limit=100)
    assert len(text) < 110
    assert "…" in text


def test_nothing_is_dropped_where_nothing_was_raised():
    drop(None)


def attempts_in_a_row(rank, port, rounds):
    """Each attempt holds 64 MB in locals and raises; memory at the start of each."""
    import psutil
    import torch
    from small import At, Small

    small, process, used, alive = Small(), psutil.Process(), [], []

    def attempt():
        used.append(process.memory_info().rss)
        alive.append(sum(ref() is not None for ref in models))
        model = torch.nn.Linear(4096, 4096)
        model.me = model
        models.append(weakref.ref(model))
        loss = model(torch.ones(1, 4096)).sum()
        try:
            loss.backward()
            raise ValueError("first")
        except ValueError as error:
            raise MemoryError(f"no room for {loss}") from error

    models = []
    for generation in range(rounds):
        try:
            small.run(At(generation, rank, 1, ("127.0.0.1", port)), attempt)
        except MemoryError as error:
            small.error = error
        small.clean()
    return {"growth": max(used[3:]) - used[2], "alive": alive, "cleaned_s": small.cleaned_s}


def test_memory_is_flat_over_ten_attempts(forks):
    (told,) = forks.run(attempts_in_a_row, ranks=1, rounds=10)
    assert told["alive"] == [0] * 10
    assert told["growth"] < 16 * 2**20


def test_children_started_inside_are_killed_and_older_ones_kept():
    older = subprocess.Popen(["sleep", "60"])
    leftovers = Leftovers()
    inside = subprocess.Popen(["sh", "-c", "sleep 61 & wait"])
    time.sleep(0.1)
    try:
        killed = leftovers.kill_children()
        assert len(killed) >= 1
        assert older.poll() is None
        assert inside.poll() is not None
        assert leftovers.kill_children() == ()
    finally:
        older.kill()
        older.wait()


def test_a_child_that_is_dead_already_is_reaped_too():
    """A dead one tells no command line. Left as it is, torch's handler raises for it later."""
    leftovers = Leftovers()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert leftovers.kill_children() == ()
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    child.returncode = -9  # nobody else's to reap any more


def test_data_loader_workers_of_a_failed_attempt_are_gone(forks):
    (told,) = forks.run(loader_left_behind, ranks=1)
    assert told["killed"] == 2
    assert told["left"] == 0
    assert told["dirt"] == []


class _Slow:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(60 if index > 2 else 0)
        return index


def loader_left_behind(rank, port):
    import psutil
    import torch.utils.data
    from small import At, Small

    small = Small()

    class Trainer:
        """Cyclic, as trainers are: the iterator is not shut down by unwinding."""

    def attempt():
        loader = torch.utils.data.DataLoader(_Slow(), num_workers=2, persistent_workers=True, batch_size=1)
        iterator = iter(loader)
        trainer = Trainer()
        trainer.me, trainer.iterator = trainer, iterator
        next(iterator)
        small.ready.set()
        for _ in iterator:
            pass

    small.stop(At(0, rank, 1, ("127.0.0.1", port)), attempt)
    left = [c for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE]
    return {"killed": len(small.cleaning.killed), "left": len(left), "dirt": list(small.dirt)}


def test_threads_that_end_in_time_are_no_dirt_and_others_are_named():
    leftovers, end = Leftovers(), threading.Event()
    soon = threading.Thread(target=time.sleep, args=(0.05,), name="prefetch")
    stays = threading.Thread(target=end.wait, name="logger")
    ours = threading.Thread(target=end.wait, name="everstep-waiter")
    for thread in (soon, stays, ours):
        thread.start()
    began = time.monotonic()
    assert leftovers.threads(0.4) == ("logger",)
    assert 0.3 < time.monotonic() - began < 1
    end.set()
    for thread in (soon, stays, ours):
        thread.join()
    assert leftovers.threads(0.0) == ()


def test_a_collection_after_settling_is_cheap(forks):
    """E26: the whole heap once, then only what came since."""
    (told,) = forks.run(collections, ranks=1)
    assert told["after_s"] < told["before_s"] / 2


def collections(rank, port):
    began = time.perf_counter()
    gc.collect()
    before = time.perf_counter() - began
    frames.settle()
    began = time.perf_counter()
    gc.collect()
    after = time.perf_counter() - began
    print(f"gc.collect before settling {before * 1e3:.1f} ms, after {after * 1e3:.1f} ms", file=sys.stderr)
    return {"before_s": before, "after_s": after}
