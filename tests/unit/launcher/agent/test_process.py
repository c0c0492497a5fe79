"""Whose end it is, when a process is ended that may be ending already."""

import os
import signal

from everstep.launcher.agent.process import Process
from everstep.process import kernel


def ended(pid):
    """Wait until it has ended, and leave it to be reaped."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def process(pid):
    return Process("worker-0", 1, lambda *_: None, lambda *_: None, pid=pid)


def forked():
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def test_one_that_runs_is_ended_by_our_order():
    pid = forked()
    try:
        assert not kernel.status(pid).ending
        one = process(pid)
        one.end()
        assert (one.expected_end, one.unasked) == (True, False)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_one_that_is_dying_keeps_its_own_end():
    pid = forked()
    os.kill(pid, signal.SIGKILL)
    try:
        ended(pid)
        assert kernel.status(pid).ending
        one = process(pid)
        one.end()
        assert (one.expected_end, one.unasked) == (False, True)
    finally:
        os.waitpid(pid, 0)
