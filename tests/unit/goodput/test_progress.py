"""The live display: what it says, and that nothing holds up the agent."""

import os

import pytest

from everstep.events import FaultNoticed, GenerationStarted, Notice, ProcessEnded, Record, RunStarted, Stamp
from everstep.goodput.progress import Progress


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            continue


def told(read):
    try:
        return os.read(read, 1 << 20).decode()
    except BlockingIOError:
        return ""


def event(at, what):
    return Record(Stamp(mono_s=at, wall_s=at, boot_id="a", pid=1, role="agent"), what)


STARTED = RunStarted(job="j", argv=(), world_size=2, spares=1)


def roster(number, why="kept", restore=None, source=None):
    return GenerationStarted(
        epoch=0, number=number, world_size=2, members=((0, 0, 10, "kept"), (1, 1, 11, why)), restore_step=restore,
        restored_from=source,
    )  # fmt: skip


def play(progress):
    progress.write(event(0.0, STARTED))
    progress.write(event(2.0, roster(0)))
    for step in range(1, 41):
        progress.progress(step, 100, 5.0 - step / 20, 2.0 + step * 0.25)
    progress.write(event(12.30, ProcessEnded(name="worker-1", child_pid=11, status=-9, expected=False, child_rank=1)))
    progress.write(event(12.30, FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=40)))
    progress.write(event(12.38, roster(1, "spare", 40, "memory")))
    for step in range(41, 61):
        progress.progress(step, 100, 3.0, 12.38 + (step - 40) * 0.25)
    progress.close(18.0)


def test_plain_lines_where_there_is_no_terminal(pipe):
    read, write = pipe
    play(Progress(write, terminal=False))
    lines = told(read).splitlines()
    assert "everstep: step 41: rank 1 killed (SIGKILL); a spare took over in 0.08 s from memory, 0 steps lost" in lines
    status = [line for line in lines if "/100" in line]
    assert len(status) <= 5  # one in five seconds, and the last
    assert status[-1] == "everstep: step 60/100, loss 3.0000, 4.0 steps/s, goodput 83 %, 1 fault survived"
    assert "\x1b" not in "".join(lines)


def test_a_bar_where_there_is_one(pipe):
    read, write = pipe
    play(Progress(write, terminal=True, width=100))
    text = told(read)
    assert "step 60/100" in text
    assert "killed (SIGKILL)" in text
    assert "\x1b[2K" in text
    assert text.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("notice", "why", "line"),
    [
        (FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=1, step=6, text="at\nKeyError: 3"),
         "kept", "step 7: rank 1 raised an exception (KeyError: 3); every process kept, on after 0.50 s, 6 steps lost"),
        (FaultNoticed(number=0, kind="stall", noticed_by="page", injured_rank=1, step=6, last_mark_s=1.5),
         "kept", "step 7: rank 1 made no progress for 3.50 s; every process kept, on after 0.50 s, 6 steps lost"),
        (FaultNoticed(number=0, kind="wedged", noticed_by="page", injured_rank=1, step=None),
         "spare", "step 1: rank 1 could not be reached and was killed; a spare took over in 0.50 s, 0 steps lost"),
        (FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=6),
         "started", "step 7: rank 1 died; a new process took over in 0.50 s, 6 steps lost"),
    ],
)  # fmt: skip
def test_a_line_for_each_kind_of_fault(pipe, notice, why, line):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(5.0, notice))
    progress.write(event(5.5, roster(1, why)))
    assert told(read) == f"everstep: {line}\n"


def test_a_peer_s_complaint_does_not_hide_the_death(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(
        event(5.0, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=0, step=3, text="reset"))
    )
    progress.write(event(5.1, ProcessEnded(name="w", child_pid=11, status=-11, expected=False, child_rank=1)))
    progress.write(event(5.1, FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=3)))
    progress.write(event(5.4, roster(1, "spare", 3)))
    assert told(read) == "everstep: step 4: rank 1 killed (SIGSEGV); a spare took over in 0.40 s, 0 steps lost\n"


def test_notices_are_shown(pipe):
    read, write = pipe
    Progress(write, terminal=False).write(event(1.0, Notice(text="limits learned: 3.2 s")))
    assert told(read) == "everstep: limits learned: 3.2 s\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_that_nobody_empties_never_blocks_and_keeps_memory_bounded(pipe, terminal):
    """A write into a full pipe would wait for ever here; the test's own time limit would end it."""
    read, write = pipe
    progress = Progress(write, terminal=terminal, width=100)
    for at in range(120):
        progress.progress(at, 120, 1.0, at * 6.0)
        progress.say("x" * 2000)
    assert 0 < progress.out.backlog <= 64 * 1024
    assert len(told(read)) > 0
    progress.tick(1e6)
    assert len(told(read)) > 0


def test_a_closed_pipe_ends_the_display_and_nothing_else(pipe):
    read, write = pipe
    os.close(read)
    progress = Progress(write, terminal=False)
    play(progress)
    assert progress.out.closed
    assert progress.out.backlog == 0


def test_goodput_counts_a_rolled_back_step_once(pipe):
    _, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    for step in range(1, 21):
        progress.progress(step, 40, None, float(step))
    progress.write(event(20.0, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=0, step=20)))
    progress.write(event(20.0, roster(1, "kept", 10, "disk")))
    for step in range(11, 41):
        progress.progress(step, 40, None, 10.0 + step)
    assert progress.goodput(50.0) == pytest.approx(40 / 50, abs=0.03)
