"""The driver of a wrapped call, alone with a line that the test speaks on: orders of events that a job rarely has."""

import os
import threading

import pytest

import everstep
from everstep.inprocess import Wrapper
from everstep.inprocess.call import Caller
from everstep.inprocess.interrupt import Interrupter
from everstep.process.page import Page
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import Link
from everstep.recovery.session import Session


def assignment(generation):
    here = {"rank": 0, "world_size": 1, "epoch": 0, "store": ["127.0.0.1", 1], "companions": {}}
    return {"kind": "world.assigned", "generation": generation} | here


class Spotless:
    """A cleaner that has nothing to do."""

    def begin(self):
        pass

    def abort(self):
        pass

    def clean(self, error):
        return ()

    def tick(self):
        pass


@pytest.fixture
def line(tmp_path):
    ours, theirs = Link.pair()
    page_fd = Page.create("test")
    session = Session(Link(theirs), Page(page_fd), "job", tmp_path, 0, Incarnation("boot", os.getpid(), 0))
    os.close(page_fd)
    session.assigned = assignment(0)
    session.lost = lambda: None
    yield ours, session
    session.stop()
    session.page.close()
    ours.close()
    theirs.close()


def heard(agent, kind):
    while True:
        message, _ = agent.receive()
        if message["kind"] == kind:
            return message


def test_a_member_that_is_told_to_leave_before_it_woke_arrives_all_the_same(line, monkeypatch):
    """Both words come before the main thread gets the lock: it never sees that it was running."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "0")
    agent, session = line
    caller = Caller(session)
    seen = []

    def speak():
        heard(agent, "world.arrived")
        with caller._changed:
            caller._heard(assignment(1), [])
            caller._heard({"kind": "world.stop", "generation": 1}, [])
        seen.append(heard(agent, "world.arrived")["generation"])
        caller._heard(assignment(2), [])
        heard(agent, "world.completed")
        caller._heard({"kind": "world.finish", "generation": 2}, [])

    def body(assigned):
        seen.append(f"in {assigned.generation}")
        if not assigned.generation:
            raise ValueError("a fault to begin with")
        return 7

    speaker = threading.Thread(target=speak)
    speaker.start()
    assert caller.call(body, Interrupter(), Spotless()) == 7
    speaker.join()
    assert seen == ["in 0", 2, "in 2"]


def test_a_ticker_that_fails_says_so_once_and_goes_on(line, monkeypatch):
    """A device's error in sealing a snapshot had ended the thread that pursues interrupts, without a word."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "0")
    agent, session = line
    said, third = [], threading.Event()

    class Broken(Spotless):
        ticks = 0

        def tick(self):
            self.ticks += 1
            if self.ticks == 3:
                third.set()
            raise RuntimeError("CUDA error: unspecified launch failure")

    def speak():
        while not said or said[-1]["kind"] != "world.completed":
            said.append(agent.receive()[0])
        caller._heard({"kind": "world.finish", "generation": 0}, [])

    caller = Caller(session)
    speaker = threading.Thread(target=speak)
    speaker.start()
    assert caller.call(lambda _: third.wait(30), Interrupter(), Broken()) is True
    speaker.join()
    (told,) = [message["text"] for message in said if message["kind"] == "world.replace"]
    assert told == "its ticker failed: RuntimeError: CUDA error: unspecified launch failure"


async def coroutine():
    pass


async def stream():
    yield 1


def generator():
    yield 1


@pytest.mark.parametrize("function", [coroutine, stream, generator])
@pytest.mark.parametrize("wrap", [everstep.resilient, Wrapper()], ids=["native", "wrapper"])
def test_what_returns_before_it_has_run_is_refused(function, wrap):
    with pytest.raises(TypeError, match="calling it returns at once"):
        wrap(function)


def test_a_method_under_the_native_surface_is_wrapped_bound():
    class Job:
        def train(self, run):
            """Train."""

    with pytest.raises(TypeError, match=r"Wrap it bound, everstep\.resilient\(it\.train\)"):
        everstep.resilient(Job.train)
    assert callable(everstep.resilient(Job().train))
