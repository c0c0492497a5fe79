"""FI-03: each type of fault, in a real process: its effect is there within 0.5 s and nothing of it is left."""

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from everstep.faults.core.plan import TYPES
from everstep.faults.injectors import inject

pytestmark = pytest.mark.procs
SOON_S = 0.5
SIGNAL = signal.SIGRTMIN + 5
ENDS = {
    "sigkill": -signal.SIGKILL, "sigterm": -signal.SIGTERM, "segfault": -signal.SIGSEGV, "abort": -signal.SIGABRT,
    "exit": 1,
}  # fmt: skip
RAISES = {"exception": b"InjectedFault", "memory": b"MemoryError"}
HANGS = ("hang", "lock", "queue", "socket", "child", "gil")


class Interrupted(BaseException):
    pass


def _interrupt(*_):
    raise Interrupted


def _victim(kind, out):
    """Say that we begin, do the harm, say what came of it and what is left."""
    signal.signal(SIGNAL, _interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.write(out, b"begin\n")
    try:
        inject(kind, "on purpose")
        said = "returned"
    except (Interrupted, Exception) as error:
        said = type(error).__name__
    left = f"{threading.active_count()} threads, {len(psutil.Process().children())} children"
    os.write(out, f"{said}; {left}\n".encode())


class Child:
    """A fork of this process (torch is not imported here) that runs one victim."""

    def __init__(self, kind):
        ours, ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.out, theirs = ours.detach(), ends.detach()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()  # pytest's; its last words here are no news
            _victim(kind, theirs)
            os._exit(0)
        os.close(theirs)
        self.pidfd = os.pidfd_open(self.pid)
        assert self.line() == b"begin\n"
        self.began = time.monotonic()

    def line(self, within_s=5.0):
        ready, _, _ = select.select([self.out], [], [], within_s)
        return os.read(self.out, 200) if ready else None

    def state(self):
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def comes_to(self, states, within_s=SOON_S):
        """Wait until the process is in one of these states, and still is a moment later."""
        while time.monotonic() < self.began + within_s:
            if self.state() in states:
                return True
            time.sleep(0.005)
        return False

    def end(self):
        select.select([self.pidfd], [], [], 5)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        os.close(self.out)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def victim():
    children = []

    def make(kind):
        children.append(Child(kind))
        return children[-1]

    yield make
    for child in children:
        try:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_every_type_is_examined():
    assert set(TYPES) == {*ENDS, *RAISES, *HANGS, "sigstop"}


@pytest.mark.parametrize("kind", ENDS)
def test_a_deadly_one_is_dead(victim, kind):
    child = victim(kind)
    ready, _, _ = select.select([child.pidfd], [], [], SOON_S)
    assert ready
    assert child.end() == ENDS[kind]


@pytest.mark.parametrize("kind", RAISES)
def test_a_raising_one_raises(victim, kind):
    child = victim(kind)
    assert child.line(SOON_S) == RAISES[kind] + b"; 1 threads, 0 children\n"
    assert child.end() == 0


@pytest.mark.parametrize("kind", HANGS)
def test_a_hanging_one_hangs_until_a_signal_s_handler_raises(victim, kind):
    child = victim(kind)
    assert child.comes_to("S")
    assert child.line(0.1) is None
    began = time.monotonic()
    os.kill(child.pid, SIGNAL)
    assert child.line() == b"Interrupted; 1 threads, 0 children\n"
    assert time.monotonic() - began < SOON_S
    assert child.end() == 0


def test_a_killed_hang_leaves_no_child_of_its_own(victim):
    child = victim("child")
    process = psutil.Process(child.pid)
    while not process.children():
        time.sleep(0.005)
    [grandchild] = process.children()
    os.kill(child.pid, signal.SIGKILL)
    assert child.end() == -signal.SIGKILL
    assert psutil.wait_procs([grandchild], 5)[1] == []


def test_a_stopped_one_is_stopped_and_goes_on_when_continued(victim):
    child = victim("sigstop")
    assert child.comes_to("T")
    os.kill(child.pid, signal.SIGCONT)
    assert child.line() == b"returned; 1 threads, 0 children\n"
    assert child.end() == 0


def test_the_gil_is_held(victim):
    """No other thread of the process runs: seen from a ticking one."""
    out, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        stop = threading.Event()

        def tick():
            while not stop.wait(0.01):
                os.write(theirs, b".")

        threading.Thread(target=tick, daemon=True).start()
        stop.wait(0.1)
        os.write(theirs, b"!")
        inject("gil", "")
    os.close(theirs)
    seen = b""
    try:
        while not seen.partition(b"!")[1]:
            seen += os.read(out, 100)
        while select.select([out], [], [], SOON_S)[0]:
            seen += os.read(out, 100)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(out)
    before, _, after = seen.partition(b"!")
    assert len(before) > 2
    assert len(after) <= 2
