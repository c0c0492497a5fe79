"""Aborts that go on behind: entered at once, waited for by nobody but the next abort and the end."""

import gc
import threading
import weakref

import pytest

from everstep.inprocess.behind import Behind
from everstep.inprocess.communication import Communication
from everstep.resources import Registry

LONG_S = 30.0


class Backend:
    """A backend whose abort lasts until it is let go."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.entered, self.let_go, self.calls = threading.Event(), threading.Event(), 0

    def name(self) -> str:
        return "slow"

    def abort(self) -> None:
        self.calls += 1
        self.entered.set()
        self.let_go.wait(LONG_S)
        if self.error is not None:
            raise self.error


class Group:
    """A group as torch's books hold it."""

    _device_types = ("cpu",)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def _get_backend(self, device: str) -> Backend:
        return self.backend

    def shutdown(self) -> None:
        raise AssertionError("a group whose abort goes on behind is not destroyed as well: that waits for it")


@pytest.fixture
def backends():
    made: list[Backend] = []

    def make(error: BaseException | None = None) -> Backend:
        made.append(Backend(error))
        return made[-1]

    yield make
    for backend in made:
        backend.let_go.set()


def test_all_are_entered_before_begin_returns_and_nobody_waits_for_one(backends):
    behind, many = Behind(), [backends() for _ in range(5)]
    behind.begin({str(n): backend.abort for n, backend in enumerate(many)})
    assert all(backend.entered.wait(LONG_S) for backend in many)
    assert behind.running() == tuple("01234")
    many[0].let_go.set()
    for backend in many[1:]:
        backend.let_go.set()
    assert behind.wait(LONG_S) == ()
    assert behind.running() == ()


def test_one_that_runs_is_not_called_again_and_one_that_ended_is(backends):
    behind, backend = Behind(), backends()
    behind.begin({"a": backend.abort})
    behind.begin({"a": backend.abort})
    assert backend.calls == 1
    backend.let_go.set()
    assert behind.wait(LONG_S) == ()
    behind.begin({"a": backend.abort})
    assert behind.wait(LONG_S) == ()
    assert backend.calls == 2


def test_who_fails_is_told_once(backends):
    behind, backend = Behind(), backends(error=RuntimeError("no device"))
    backend.let_go.set()
    behind.begin({"a": backend.abort})
    behind.wait(LONG_S)
    assert behind.failed() == ("a: RuntimeError: no device",)
    assert behind.failed() == ()


def test_a_wait_ends_at_its_deadline_and_names_who_is_late(backends):
    behind, backend = Behind(), backends()
    behind.begin({"a": backend.abort})
    assert behind.wait(0.0) == ("a",)


def test_what_is_aborted_dies_in_its_own_thread(backends):
    """The destructor of a group waits for threads: it must run where it makes nobody wait (rule 2)."""
    died_on, ended = [], threading.Event()
    behind, backend = Behind(), backends()
    group = Group(backend)

    def died() -> None:
        died_on.append(threading.current_thread().name)
        ended.set()

    weakref.finalize(group, died)
    behind.begin({"nccl group 0": lambda held=group: held.backend.abort()})
    del group
    gc.collect()
    assert died_on == [], "somebody has to hold it while it is aborted"
    backend.let_go.set()
    assert ended.wait(LONG_S)
    assert died_on == ["everstep-abort-nccl group 0"]
    behind.wait(LONG_S)


@pytest.fixture
def books():
    """Torch's own books, emptied afterwards."""
    from torch.distributed import distributed_c10d as c10d

    yield c10d._world.pg_names
    c10d._world.pg_names.clear()


def test_the_next_generation_begins_while_the_last_one_s_abort_goes_on(backends, books):
    communication, groups = Communication(registry=Registry()), [Group(backends()) for _ in range(3)]
    books.update({group: str(n) for n, group in enumerate(groups)})
    told = communication.abort(LONG_S)
    assert told.clean
    assert len(told.behind) == 3, "three groups, all at the same time (IR-05)"
    assert told.backends == tuple(f"slow group {n}" for n in range(3))
    communication.finish()
    assert not books, "forgotten, though none has ended"
    for group in groups:
        group.backend.let_go.set()
    assert communication.unfinished(LONG_S) == ()
    assert communication.failures() == ()


def test_the_next_abort_waits_with_a_deadline_and_names_what_is_stuck(backends, books):
    communication = Communication(registry=Registry())
    first, second = Group(backends()), Group(backends())
    books[first] = "0"
    assert communication.abort(0.0).clean
    assert communication.abort(0.0).clean, "a second abort of the same generation asks for nothing new"
    assert first.backend.calls == 1
    communication.finish()
    books[second] = "0"
    told = communication.abort(0.0)
    assert told.late == ("slow group 0 (1)",)
    assert set(told.behind) == {"slow group 0 (1)", "slow group 0 (2)"}
    communication.finish()


def test_nothing_is_aborted_while_the_main_thread_destroys(backends, books, monkeypatch):
    """NVRx deadlocks there (W13's neighbour, seen on GPUs): both wait for the same lock of the group."""
    from torch.distributed import distributed_c10d as c10d

    communication, told = Communication(registry=Registry()), []
    group = Group(backends())
    books[group] = "0"

    def inside() -> None:
        thread = threading.Thread(target=lambda: told.append(communication.abort(LONG_S)))
        thread.start()
        thread.join(LONG_S)

    monkeypatch.setattr(group, "shutdown", inside, raising=False)
    c10d._world.default_pg = group
    c10d._world.pg_map[group] = ("slow", None)
    c10d.destroy_process_group()
    assert told[0].backends == ()
    assert group.backend.calls == 0
    communication.finish()
