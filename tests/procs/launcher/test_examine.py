"""Evidence of a rank that cannot speak: taken from outside, within its time, and never a reason to fail."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from everstep.clock import SYSTEM
from everstep.launcher.agent import examine
from everstep.launcher.agent.examine import Examiner
from everstep.launcher.agent.spy import find_spy
from everstep.launcher.agent.worker import Worker
from everstep.launcher.core.limits import Verdict
from everstep.process.loop import Loop
from everstep.process.page import Page

pytestmark = pytest.mark.procs
SOFT, HARD = Verdict(1, "interrupt", "silent"), Verdict(1, "kill", "does not answer")
PATIENCE_S = 30.0


@pytest.fixture
def loop():
    made = Loop(SYSTEM)
    yield made
    made.close()


@pytest.fixture
def child():
    """A process as the agent knows it, that runs `text`; says when it is about to hang."""
    made, pages = [], []

    def begin(text, page_fd=-1):
        said, says = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text), str(says), str(page_fd)],
            pass_fds=[says, *([page_fd] if page_fd >= 0 else [])],
        )
        os.close(says)
        number = int(os.read(said, 8) or 0)
        os.close(said)
        made.append(process)
        own = page_fd if page_fd >= 0 else Page.create("its own")
        pages.append((Page(own), own if page_fd < 0 else -1))
        return Worker(SimpleNamespace(pid=process.pid), own, pages[-1][0], 0, dump_signal=number, stack="told")

    yield begin
    for page, own in pages:
        page.close()
        if own >= 0:
            os.close(own)
    for process in made:
        process.kill()
        process.wait()


SLEEPS = "import os, sys, time; os.write(int(sys.argv[1]), b'0'); time.sleep(600)"
HOLDS = """
    import ctypes, os, sys
    from everstep.process import stacks
    from everstep.process.page import Page
    def in_the_call(number):
        os.write(int(sys.argv[1]), str(number).encode())
        held = ctypes.PyDLL(None)
        while True:  # a signal that is handled ends libc's sleep
            held.sleep(600)
    in_the_call(stacks.listen(Page(int(sys.argv[2]), stacks=True).stacks_fd))
"""


def conclude(loop, examiner, worker, verdict):
    """Return the evidence, and after how long it came."""
    found, began = [], time.monotonic()
    examiner.conclude(worker, verdict, lambda _, __, evidence: found.append(evidence))
    until(loop, lambda: found)
    return found[0], time.monotonic() - began


def until(loop, holds):
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit
        loop.later(0.01, lambda: None)
        loop.turn()


def spy(tmp_path, text):
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_native_stack_is_added_to_what_the_rank_has_told(loop, child, tmp_path):
    examiner, worker = Examiner(loop, spy(tmp_path, 'echo "$@"; echo frames')), child(SLEEPS)
    examiner.near(worker)
    assert worker.held, "a state of being traced is ours"
    until(loop, lambda: not worker.held)
    evidence, seconds = conclude(loop, examiner, worker, SOFT)
    assert evidence == f"told\nnative stack, by py-spy:\ndump --native --pid {worker.process.pid}\nframes"
    assert seconds < 1
    assert conclude(loop, examiner, worker, SOFT)[0] == "told", "it is of one silence"


@pytest.mark.parametrize("text", ["exec sleep 600", "exit 1", "kill -9 $$"])
def test_a_spy_that_hangs_or_fails_costs_its_stack_and_nothing_else(loop, child, tmp_path, text, monkeypatch):
    monkeypatch.setattr(examine, "NATIVE_S", 0.3)
    examiner, worker = Examiner(loop, spy(tmp_path, text)), child(SLEEPS)
    examiner.near(worker)
    assert conclude(loop, examiner, worker, SOFT)[0] == "told", "an interrupt waits for nothing"
    examiner.near(worker)
    evidence, seconds = conclude(loop, examiner, worker, HARD)
    assert evidence == ""
    assert seconds < 5
    until(loop, lambda: not worker.held)
    assert not examiner.busy


def test_without_py_spy_nothing_is_tried(loop, child, tmp_path):
    examiner, worker = Examiner(loop, str(tmp_path / "none")), child(SLEEPS)
    examiner.near(worker)
    assert not worker.held
    assert conclude(loop, examiner, worker, SOFT)[0] == "told"


def test_a_rank_that_holds_the_interpreter_lock_shows_its_stack_all_the_same(loop, child, monkeypatch):
    fd = Page.create("examined")
    try:
        worker = child(HOLDS, fd)
        for _ in range(2):  # the second time it is not mixed with the first
            evidence, seconds = conclude(loop, Examiner(loop, ""), worker, HARD)
            assert "in in_the_call" in evidence
            assert evidence.count("Current thread") == 1
            assert seconds < 5
    finally:
        os.close(fd)


@pytest.mark.skipif(not find_spy(), reason="py-spy is not installed on this machine")
def test_py_spy_names_the_call_of_c(loop, child):
    examiner, worker = Examiner(loop), child(SLEEPS)
    examiner.near(worker)
    until(loop, lambda: not worker.held)
    evidence, _ = conclude(loop, examiner, worker, SOFT)
    assert "sleep" in evidence.partition("py-spy")[2]


def test_it_is_found_beside_the_interpreter_or_in_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/somewhere/{name}")
    assert find_spy() == "/somewhere/py-spy"
    assert spy(tmp_path, "true") == find_spy()
