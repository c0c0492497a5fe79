"""How a worker of an unwrapped script is ended: by SIGTERM where it has a handler, in the time that it makes use of."""

import os
import signal

import pytest

from everstep.clock import SYSTEM
from everstep.launcher.agent import parting
from everstep.launcher.agent.parting import Parting
from everstep.launcher.agent.process import Process
from everstep.process.loop import Loop


def none():
    """What is done by who has no handler: nothing."""


def handled(*_):
    os._exit(7)


def handles():
    signal.signal(signal.SIGTERM, handled)


def never_comes_to_it():
    signal.signal(signal.SIGTERM, handled)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def ignores():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def busy(*_):
    while True:
        pass


def is_busy_with_it():
    signal.signal(signal.SIGTERM, busy)


def forked(prepare):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        prepare()
        os.write(writer, b"r")
        while True:
            signal.pause()
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return pid


@pytest.mark.parametrize(
    ("prepare", "code", "said"),
    [
        (none, -9, ""), (handles, 7, ""), (ignores, -9, ""),
        (never_comes_to_it, -9, "is killed: SIGTERM has not ended it in 0.3 s without using the processor"),
        (is_busy_with_it, -9, "is killed: SIGTERM has not ended it in 2 s"),
    ],
)  # fmt: skip
def test_who_is_ended_how(monkeypatch, prepare, code, said):
    monkeypatch.setattr(parting, "IDLE_S", 0.3)
    monkeypatch.setattr(parting, "ENOUGH_S", 0.001)
    loop, told = Loop(SYSTEM), []
    pid = forked(prepare)
    process = Process("worker-0", 1, lambda *_: None, lambda *_: None, pid=pid)
    try:
        Parting(loop, 2.0, told.append).end(process)
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            loop.later(0.02, lambda: None)
            loop.turn()
        process.gone = True
        assert os.waitstatus_to_exitcode(status) == code
        assert (process.expected_end, process.unasked) == (True, False)
        assert [text.partition(") ")[2] for text in told] == ([said] if said else [])
    finally:
        loop.close()
