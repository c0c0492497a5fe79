"""What the kernel shows of processes that no limit is kept of: stopped ones, and those that do nothing at all."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from everstep.launcher.agent.frozen import Idle, Stopped
from everstep.process import kernel

pytestmark = pytest.mark.procs


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sh", "-c", "echo up; exec sleep 1000"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        until(lambda: b"sleep" in Path(f"/proc/{process.pid}/comm").read_bytes() and state(process.pid) == "S")
        yield process
        process.kill()


def state(pid):
    return kernel.status(pid).state


def until(what):
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_only_who_is_stopped_at_look_after_look_is_told(sleeper):
    stopped = Stopped(3)
    assert stopped.look([sleeper.pid]) == []
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(lambda: state(sleeper.pid) == "T")
    assert [stopped.look([sleeper.pid]) for _ in range(4)] == [[], [], [sleeper.pid], [sleeper.pid]]
    os.kill(sleeper.pid, signal.SIGCONT)
    until(lambda: state(sleeper.pid) == "S")
    assert stopped.look([sleeper.pid]) == []
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(lambda: state(sleeper.pid) == "T")
    assert stopped.look([sleeper.pid]) == [], "a job that was stopped and continued begins anew"
    assert stopped.look([0, 2**22 + 1]) == [], "who is gone is not stopped"


def test_idle_is_who_uses_no_cpu_and_has_no_child(sleeper):
    idle = Idle(600.0)
    assert idle.look([sleeper.pid], 0.0) == {}
    assert idle.look([sleeper.pid], 600.0) == {}
    assert idle.look([sleeper.pid], 601.0) == {sleeper.pid: 601.0}
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo up; wait"], stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        (child,) = kernel.children_of(parent.pid)
        assert idle.look([parent.pid], 0.0) == {}
        assert idle.look([parent.pid], 700.0) == {}, "its child may do its work"
        os.kill(child, signal.SIGKILL)


def test_who_does_something_is_not_idle():
    idle, me = Idle(600.0), os.getpid()
    assert idle.look([me], 0.0) == {}
    before = kernel.status(me).cpu_s
    until(lambda: sum(range(10_000)) and kernel.status(me).cpu_s > before + 0.2)
    assert idle.look([me], 700.0) == {}
